// One block of memkind memory, and what is said when there is none.
//
// Threads: every function may be called from any thread.
#pragma once

#include <memkind.h>

#include <cstddef>
#include <memory>
#include <string>

#include "memory/policy.h"

namespace hbm::memory {

struct FreeBlock {
  memkind_t kind;
  void operator()(void* block) const noexcept { memkind_free(kind, block); }
};
using OwnedBlock = std::unique_ptr<void, FreeBlock>;

// Aligned to 64 bytes, or to a page from a page up. Null when memkind gives none.
OwnedBlock take_block(memkind_t kind, size_t bytes) noexcept;

// "cannot allocate N bytes under memory policy "P"", for the start of a message.
std::string cannot_allocate(size_t bytes, Policy policy);

}  // namespace hbm::memory
