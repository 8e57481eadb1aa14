// Gives each rank of a machine CPUs of its own, and with them the memory nearest to it.
//
// Binding follows the layout in which a process has one NUMA node: its cores, its DDR, and the HBM
// node closest to them. Only CPUs are bound. Memory follows by itself: the kernel takes ordinary
// pages from the node of the thread that touches them first, memkind takes HBM from the node
// closest to the thread that allocates, and either spills elsewhere by its policy instead of
// getting the process killed, as a hard memory binding would.
//
// Bind before memory is allocated and before threads are pooled: what exists stays where it is.
// Threads: call it from one thread at a time.
#pragma once

#include <string>

namespace hbm::memory {

enum class BindMode {
  kNone,  // leave the process as it is
  kCore,  // one core, all its hardware threads
  kNuma,  // the cores of one NUMA node; ranks share a node when there are more ranks than nodes
};

// Throws Error(kInvalid), naming the three choices, for any other name.
BindMode parse_bind_mode(const std::string& name);

// Binds all threads of this process, within the CPUs it was allowed before the first bind(). Ranks
// that are close in number get cores or nodes that are close; fewer ranks than cores or nodes are
// spread evenly. Returns what was done in words, as in "one core (CPUs 3,67) on NUMA nodes 0,4".
// REQUIRES: every local rank calls it with the same mode and local_size, and the same CPUs allowed.
// Throws Error(kInvalid) unless 0 <= local_rank < local_size, or with the counts under kCore when
// there are more ranks than cores; Error(kUnavailable) when the kernel refuses.
std::string bind(BindMode mode, int local_rank, int local_size);

}  // namespace hbm::memory
