// Copies between shared memory, which other threads and processes access concurrently, and private
// memory.
//
// An element is an aligned group of 1, 2, 4 or 8 bytes in the shared memory. Each element inside
// the copied range is loaded or stored by one access of the processor, so no reader sees a
// half-written element. This also holds if the copying thread is interrupted. memcpy() cannot be
// used, because glibc copies by `rep movsb`, which an interrupt can stop at any byte.
//
// On x86-64 one access moves 16 aligned bytes of the shared memory. Intel and AMD guarantee that
// this access is atomic on processors with AVX, but not if it is a non-temporal store.
//
// Threads: any. The functions order no other memory access.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::box::protocol {

// The kind of memory that payloads are in. It decides how they are copied.
enum class Payloads {
  kPrivate,  // only this stream accesses it until the payload is sent or received
  kShared,   // other threads and processes access it concurrently: copied by elements
};

// How a copy stores. On x86-64, non-temporal stores bypass the caches; elsewhere both values mean
// the same.
enum class Stores { kCached, kNonTemporal };

// Copy `bytes` bytes. Neither address needs alignment.
void load_elements(std::byte* own, const std::byte* shared, uint64_t bytes,
                   Stores stores = Stores::kCached) noexcept;
void store_elements(std::byte* shared, const std::byte* own, uint64_t bytes,
                    Stores stores = Stores::kCached) noexcept;

// Splits a copy so that it cuts no element. `all` bytes are left to copy from or to `shared`, and
// the caller could copy `bytes` of them now. Returns how many bytes to copy now: the copy then ends
// at the end of `all`, or at an address of `shared` that is a multiple of 8.
uint64_t uncut_bytes(const std::byte* shared, uint64_t bytes, uint64_t all) noexcept;

}  // namespace hbm::box::protocol
