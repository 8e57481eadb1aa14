// How much memory the NUMA nodes can still give.
//
// The kernel kills a process that touches a page of a full node it is bound to, so a heap asks here
// before it lets a page be touched. Figures are the kernel's, read at each call (about 15 us a
// node); a container's own memory limit is not in them.
//
// Threads: every function may be called from any thread. Each throws Error(kUnavailable) when the
// kernel's figures cannot be read.
#pragma once

#include <cstdint>
#include <vector>

namespace hbm::memory {

// Free pages of the node plus half of its file cache, which the kernel gives up when asked. 0 for a
// node that does not exist.
uint64_t node_free_bytes(int node);

// What may be taken from the nodes: their free bytes less a margin on each (32 MiB and 1/128 of the
// node) that stays for the kernel and for processes that allocate at the same moment. Under
// `interleave` the fullest node counts for all, because pages go to each in turn.
uint64_t room_on(const std::vector<int>& nodes, bool interleave);

// What ordinary memory can give, by the kernel's own estimate over the whole machine.
uint64_t machine_room();

// All memory of the machine, whatever is in use.
uint64_t machine_total();

// The nodes that the kernel's policy for the block's pages names; all of the block must come from
// one mapping. Empty under the default policy (ordinary memory).
// Throws Error(kUnavailable) when the kernel refuses the question.
std::vector<int> block_nodes(const void* block);

}  // namespace hbm::memory
