// Binds each rank of a machine to CPUs of its own, and so to the nearest memory.
//
// kCore and kNuma assume that each process uses one NUMA node: its cores, its DDR, and the closest
// HBM node. Only CPUs are bound, and memory follows. The kernel allocates ordinary pages on the
// node of the thread that touches them first. memkind allocates HBM on the node closest to the
// allocating thread. If that node is full, the kernel and memkind take memory of other nodes, as
// the policy allows. With a hard memory binding, the kernel would kill the process instead.
//
// Bind before memory is allocated, because existing memory does not move. Bind before thread pools
// start, because they may choose their number of threads by the CPUs that are allowed then.
//
// Threads: call it from one thread at a time.
#pragma once

#include <string>

namespace hbm::memory {

enum class BindMode {
  kNone,  // leave the process as it is
  kCore,  // one core, all its hardware threads
  kNuma,  // the cores of one NUMA node; with more ranks than nodes, ranks share nodes
  // The rank's part of the machine: whole NUMA nodes. With more ranks than nodes, a node's ranks
  // take whole L3 caches of it. With more ranks than caches they share a cache's cores, and without
  // such caches the node's. Parts differ in size if the ranks do not divide the nodes or caches.
  kAuto,
};

// Parses "none", "core", "numa" or "auto". Throws Error(kInvalid), naming these, for another name.
BindMode parse_bind_mode(const std::string& name);

// Binds all threads of this process, within the CPUs that it was allowed before the first bind().
// Ranks with close numbers get close cores or nodes. Fewer ranks than cores or nodes are spread
// evenly.
//
// Returns a description of the binding, as in "one core (CPUs 3,67) on NUMA nodes 0,4". REQUIRES:
// every local rank calls it with the same mode, local_size and allowed CPUs. Throws Error(kInvalid)
// unless 0 <= local_rank < local_size. Throws Error(kInvalid) with the counts if kCore has more
// ranks than cores. Throws Error(kUnavailable) if the kernel refuses.
std::string bind(BindMode mode, int local_rank, int local_size);

}  // namespace hbm::memory
