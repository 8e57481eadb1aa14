// Puts memory that processes share on the NUMA nodes that memkind chooses for a policy.
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
// Throws Error(kUnavailable) when memkind gives none.
std::vector<int> hbm_nodes(Policy policy);

// For the file that is mapped there, so that a page lies on the nodes whichever process touches it
// first. Nothing for no nodes.
// REQUIRES: [base, base + bytes) is one shared mapping of a memfd.
// Throws Error(kUnavailable) when the kernel refuses.
void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes);

// Sees to it that there is memory for a block of such a file: on the nodes, whose pages are in
// place on return under kBind and kInterleave, or, under kPreferred and kDdr, anywhere. Returns how
// many of its bytes the nodes take; fewer than all are said in the log.
// Throws Error(kExhausted) otherwise; then no page of the block is in place.
uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes);

}  // namespace hbm::memory
