// Detects strided arrays whose elements share memory. The answers are exact.
//
// The reach of a dimension is (size - 1) * stride. Elements of an array do not overlap if each
// stride is larger than the sum of the reaches of all dimensions with smaller strides. Slices,
// transposes and diagonals of contiguous arrays are such arrays: elements_overlap() only sorts
// their strides. arrays_overlap() first compares the address ranges of the two arrays. Then it
// treats two arrays of equal sizes and strides as one array with one more dimension.
//
// If these tests do not decide, the functions visit each element and mark its address in a bitmap,
// until two elements have the same address. They throw Error(kExhausted) if there is no memory for
// the bitmap.
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
// two elements of the same array share a byte.
bool arrays_overlap(const StridedArray& a, const StridedArray& b);

}  // namespace hbm
