// Copies between shared memory, which others read and write at the same time, and memory of one's
// own.
//
// An element is an aligned one of 1, 2, 4 or 8 bytes in the shared memory. Each one that lies
// wholly in the copied range is loaded or stored by a single atomic access (relaxed), so that
// nobody sees a part of it, and no mixture is taken. Neither function orders anything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::smb {

// Whether others use the memory that payloads are sent from and received into.
enum class Payloads {
  kOwn,     // its owner alone, until they are sent or have arrived
  kShared,  // others read and write it meanwhile
};

void load_elements(std::byte* own, const std::byte* shared, uint64_t bytes) noexcept;
void store_elements(std::byte* shared, const std::byte* own, uint64_t bytes) noexcept;

// How many of the `all` bytes at `shared` to copy now where there are `bytes`: these, but for the
// start of an element that continues behind them.
uint64_t uncut_bytes(const std::byte* shared, uint64_t bytes, uint64_t all) noexcept;

}  // namespace hbm::smb
