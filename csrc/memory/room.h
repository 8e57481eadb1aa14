// Room for memory: the NUMA nodes that memkind chooses for a policy, how much may still be taken
// from them and from the machine (room.cpp), and commitments of it to a block (commit.cpp).
//
// The kernel kills a process that touches a page of a full node it is bound to, so heaps, segments
// and pools ask here before they let a page be touched. Figures are the kernel's, read at each call
// (about 15 us a node, and as much a control group) but for those of shared_room().
//
// Threads: every function may be called from any thread, for blocks that no other thread uses. Each
// throws Error(kUnavailable) when the kernel's figures cannot be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

// Bytes that may be taken from the nodes: their free bytes less a margin on each (32 MiB and 1/128
// of the node) that stays for the kernel and for processes that allocate at the same moment. Under
// `interleave` the fullest node counts for all, because pages go to each in turn.
uint64_t room_on(const std::vector<int>& nodes, bool interleave);

// Bytes that ordinary memory can give, by the kernel's own estimate over the whole machine and over
// this process' control groups (control_group.h).
uint64_t machine_room();

// The same for `bytes` of a memfd: the kernel counts them against vm.overcommit_memory only when
// they are touched, and then kills. Private memory is counted when it is mapped.
//
// Messages between the ranks of a node ask for each block that they go through, so requests of up
// to 16 MiB together, and 1/64 of what there was, are answered by one look, for 100 ms: each gets
// what that look found, less what was asked for since.
uint64_t shared_room(uint64_t bytes);

// Sees to it, ahead of use, that the nodes of a block can hold it: returns how many of its bytes
// lie on `nodes` already or find room there (room_on()). When that is all of them their pages are
// resident on return under kBind and kInterleave, so that they cannot be missing later; under
// kPreferred pages come when they are first touched. When it is fewer no page stays that was
// touched here: madvise(`give_back`) takes those away, MADV_DONTNEED for private memory and
// MADV_REMOVE for shared.
//
// REQUIRES: the pages of the block are bound to `nodes` by the policy, which is not kDdr.
uint64_t commit(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes,
                int give_back);

// The words of an error when commit() returned no more than `fitting` of `bytes`.
std::string shortage(size_t bytes, Policy policy, const std::vector<int>& nodes, uint64_t fitting);

// Where memkind takes the policy's HBM from, for the thread that asks. Empty when it comes from
// ordinary memory (comes_from_hbm() in policy.h, which says what is thrown).
// Throws Error(kExhausted) or PlacingError (placement.h) when memkind gives none, with the kernel's
// reason.
std::vector<int> hbm_nodes(Policy policy);

// Sees to it that there is memory for a block of a memfd that lies on the nodes (placement.h): on
// the nodes, whose pages are resident on return under kBind and kInterleave, or, under kPreferred
// and kDdr, anywhere. Returns how many of its bytes the nodes take; fewer than all are said in the
// log. Throws Error(kExhausted) otherwise; then no page of the block is resident.
uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes);

}  // namespace hbm::memory
