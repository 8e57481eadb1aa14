// The NUMA nodes that memkind chooses for a policy, and room on them for memory that processes
// share.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

// Where memkind takes the policy's HBM from, for the thread that asks. Empty when it comes from
// ordinary memory (comes_from_hbm() in kinds.h, which says what is thrown).
// Throws Error(kExhausted) or PlacingError (place.h) when memkind gives none, with the kernel's
// reason.
std::vector<int> hbm_nodes(Policy policy);

// Sees to it that there is memory for a block of a memfd that lies on the nodes (place.h): on the
// nodes, whose pages are in place on return under kBind and kInterleave, or, under kPreferred and
// kDdr, anywhere. Returns how many of its bytes the nodes take; fewer than all are said in the log.
// Throws Error(kExhausted) otherwise; then no page of the block is in place.
uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes);

}  // namespace hbm::memory
