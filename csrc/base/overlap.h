// Detects strided arrays whose elements share memory. The answers are exact.
//
// Both functions only sort the strides if each stride is larger than the reach of all smaller ones,
// as in a slice, transpose or diagonal of a contiguous array. Otherwise they visit each element
// until two meet, with a bitmap of the addresses. They throw Error(kExhausted) if there is no
// memory for the bitmap.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <span>

namespace hbm {

// Returns true if two elements of an array have the same address. Strides are in elements and not
// negative.
bool elements_overlap(std::span<const int64_t> sizes, std::span<const int64_t> strides);

struct StridedArray {
  uint64_t begin;    // address of the first element
  uint64_t element;  // bytes
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
};

// Returns true if an element of one array shares a byte with an element of the other. REQUIRES: no
// two elements of the same array do.
bool arrays_overlap(const StridedArray& a, const StridedArray& b);

}  // namespace hbm
