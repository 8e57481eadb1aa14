// Sees to it, ahead of use, that the NUMA nodes of a block can hold it.
//
// Threads: every function may be called from any thread, for blocks that no other thread uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

// Returns how many of the block's bytes lie on `nodes` already or find room there (room_on()). When
// that is all of them their pages are in place on return under kBind and kInterleave, so that they
// cannot be missing later; under kPreferred pages come when they are first touched. When it is
// fewer no page stays that was put in place: madvise(`give_back`) takes those away, MADV_DONTNEED
// for private memory and MADV_REMOVE for shared.
//
// REQUIRES: the pages of the block are bound to `nodes` by the policy, which is not kDdr.
uint64_t commit(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes,
                int give_back);

// What to say when commit() returned no more than `fitting` of `bytes`.
std::string shortage(size_t bytes, Policy policy, const std::vector<int>& nodes, uint64_t fitting);

}  // namespace hbm::memory
