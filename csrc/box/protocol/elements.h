// Copies between shared memory, which others read and write meanwhile, and private memory.
//
// An element is an aligned one of 1, 2, 4 or 8 bytes in the shared memory. A single access of the
// processor loads or stores each element that is wholly in the copied range, so that other threads
// and processes see it whole, old or new. This also holds if the copying thread is interrupted.
// memcpy() does not suit: glibc copies by `rep movsb`, which an interrupt stops at any byte.
//
// On x86-64 one access moves 16 aligned bytes of the shared memory. Intel and AMD guarantee its
// atomicity on processors with AVX.
//
// Threads: any. Neither copy orders anything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::smb {

// Whether others use the memory that payloads are sent from and received into.
enum class Payloads {
  kOwn,     // its owner alone, until they are sent or have arrived
  kShared,  // others read and write it meanwhile
};

// How a copy stores. On x86-64, non-temporal stores bypass the caches; elsewhere both are the same.
enum class Stores { kCached, kNonTemporal };

// Copy `bytes` bytes. Neither address needs alignment.
void load_elements(std::byte* own, const std::byte* shared, uint64_t bytes,
                   Stores stores = Stores::kCached) noexcept;
void store_elements(std::byte* shared, const std::byte* own, uint64_t bytes,
                    Stores stores = Stores::kCached) noexcept;

// How many of the `all` bytes at `shared` to copy now where there are `bytes`: these, but for the
// start of an element that continues behind them.
uint64_t uncut_bytes(const std::byte* shared, uint64_t bytes, uint64_t all) noexcept;

}  // namespace hbm::smb
