// One block of private memory, and what is said when there is none.
//
// Threads: every function may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

struct FreeBlock {
  memkind_t kind = nullptr;  // null for a mapping of the block's own,
  size_t mapped_bytes = 0;   // of this size

  void operator()(void* block) const noexcept;
};
using OwnedBlock = std::unique_ptr<void, FreeBlock>;

// Aligned to 64 bytes, or to a page from a page up. Null when memkind gives none, which also
// happens when the kernel has room: memkind asks it for more than the block, by up to a quarter.
OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept;

// Maps exactly the pages that hold `bytes`, on the nodes; without nodes, anywhere.
// Throws Error(kExhausted) when the kernel gives no such mapping, PlacingError (place.h) when it
// refuses to place it.
OwnedBlock map_block(size_t bytes, Policy policy, const std::vector<int>& nodes);

// "cannot allocate N bytes under memory policy "P"", for the start of a message.
std::string cannot_allocate(size_t bytes, Policy policy);

}  // namespace hbm::memory
