// What memory the machine and its NUMA nodes have, by the kernel's figures of the moment.
//
// Threads: every function may be called from any thread. Each throws Error(kUnavailable) when the
// kernel's figures cannot be read.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/meminfo.h"

namespace hbm::memory {

// Free pages of a node plus half of its file cache, which the kernel gives up when asked.
uint64_t free_bytes(const MemInfo& node);

// 0 for a node that does not exist.
uint64_t node_free_bytes(int node);

// All memory of the nodes, whatever is in use.
uint64_t nodes_total(const std::vector<int>& nodes);

// All memory of the machine, whatever is in use.
uint64_t machine_total();

// The most that the kernel lets processes map further, whether they touch it or not: its setting
// vm.overcommit_memory. The largest number when that sets no bound.
uint64_t overcommit_room(const MemInfo& machine);

// The nodes that the kernel's policy for the block's pages names; all of the block must come from
// one mapping. Empty under the default policy (ordinary memory).
// Throws Error(kUnavailable) when the kernel refuses the question.
std::vector<int> block_nodes(const void* block);

}  // namespace hbm::memory
