// Room for memory. Finds the NUMA nodes that memkind chooses for a policy, and the memory that may
// still be allocated on these nodes and on the machine. Commits room to a block.
//
// The kernel kills a process that touches a page that is bound to a full node. So heaps, segments
// and pools ask here before they touch a page. Each call reads the kernel's figures, except
// shared_room(). A reading takes about 15 us for each node and each control group.
//
// Threads: every function may be called from any thread, for blocks that no other thread uses. Each
// throws Error(kUnavailable) if the kernel's figures cannot be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

// Returns the bytes that may be allocated on the nodes: their free bytes minus a margin on each (32
// MiB and 1/128 of the node). The margin is for the kernel and for processes that allocate at the
// same time. With `interleave`, the room of the fullest node counts for each node, because pages
// are placed round-robin.
uint64_t room_on(const std::vector<int>& nodes, bool interleave);

// Returns the bytes of ordinary memory that may be allocated: the kernel's own estimate for the
// whole machine and for this process' control groups (control_group.h).
uint64_t machine_room();

// Returns the room for `bytes` more bytes of memfds: machine_room(), or the room under
// vm.overcommit_memory if it is smaller. The kernel counts private memory against that setting when
// it is mapped. It counts a memfd only when its pages are touched, and then kills the process.
//
// Messages within a node call this for each of their blocks, so it does not read the kernel's
// figures at each call. A reading serves for 100 ms, but only until 16 MiB, or 1/64 of the room if
// that is less, have been requested. Each call returns the room that was read, minus the bytes
// requested since.
uint64_t shared_room(uint64_t bytes);

// Ensures, before use, that the nodes can hold a block. Returns the bytes that are on `nodes`
// already or find room there (room_on()).
//
// If all bytes fit under kBind and kInterleave, their pages are resident on return, so they cannot
// be missing later. Under kPreferred pages become resident when first touched. If fewer bytes fit,
// commit() removes the pages that it has touched, by madvise(`discard`): MADV_DONTNEED for private
// memory, MADV_REMOVE for shared memory.
//
// REQUIRES: the policy binds the block's pages to `nodes`, and is not kDdr.
uint64_t commit(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes,
                int discard);

// Returns the text of the error after commit() has returned `fitting`, fewer than `bytes`.
std::string shortage(size_t bytes, Policy policy, const std::vector<int>& nodes, uint64_t fitting);

// Returns the nodes on which memkind allocates the policy's HBM for the calling thread. Returns no
// nodes if the policy uses ordinary memory. Throws as comes_from_hbm() (policy.h). Throws
// Error(kExhausted) or PlacingError (placement.h), with the kernel's reason, if memkind has no
// block.
std::vector<int> hbm_nodes(Policy policy);

// Ensures that there is memory for a block of a memfd that is bound to the nodes (placement.h).
// Under kBind and kInterleave the block is on the nodes, and its pages are resident on return.
// Under kPreferred and kDdr it may be anywhere. Returns the bytes that the nodes take, and logs if
// these are fewer than `bytes`. Throws Error(kExhausted) if the nodes (kBind, kInterleave) or the
// machine lack memory for the block; then take_room() has removed the pages that it touched.
uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes);

}  // namespace hbm::memory
