// hwloc's view of the machine, and what topology.h and cpu_binding.h say of it and do by it.
//
// Threads: as there.
#pragma once

#include <hwloc.h>

#include <memory>
#include <string>

#include "memory/cpu_binding.h"
#include "memory/topology.h"

namespace hbm::memory {

struct DestroyTopology {
  void operator()(hwloc_topology_t topology) const noexcept { hwloc_topology_destroy(topology); }
};
using HwlocTopology = std::unique_ptr<hwloc_topology, DestroyTopology>;
HwlocTopology load_hwloc();

// True for the one node of those attached to the same CPUs that the operating system gives them to;
// false for a node of memory alone, whose cpuset hwloc fills with the CPUs near it.
bool owns_cpus(hwloc_topology_t topology, hwloc_obj_t node);

// Writes a set as the kernel does: "0-3,8".
std::string list_of(hwloc_const_bitmap_t set);

// discover(). why_no_hbm: memkind's reason, empty where it has found HBM.
Topology discover_by_hwloc(const std::string& why_no_hbm);

// bind().
std::string bind_by_hwloc(BindMode mode, int local_rank, int local_size);

}  // namespace hbm::memory
