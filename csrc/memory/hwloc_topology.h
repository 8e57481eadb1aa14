// The parts of topology.h and cpu_binding.h that call hwloc.
//
// Threads: as in these headers.
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

// Returns true if the operating system attaches CPUs to the node. Returns false for a node that has
// only memory. hwloc gives such a node a cpuset too: the CPUs near the node.
bool owns_cpus(hwloc_topology_t topology, hwloc_obj_t node);

struct FreeBitmap {
  void operator()(hwloc_bitmap_t set) const noexcept { hwloc_bitmap_free(set); }
};
using CpuSet = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

// Returns the CPUs that this process may use. Throws Error(kUnavailable) if the kernel does not
// say.
CpuSet current_cpus(hwloc_topology_t topology);

// Returns a set in the kernel's notation: "0-3,8".
std::string list_of(hwloc_const_bitmap_t set);

// Implements discover(). `why_no_hbm`: memkind's reason; empty if memkind has found HBM.
Topology discover_by_hwloc(const std::string& why_no_hbm);

// Implements bind().
std::string bind_by_hwloc(BindMode mode, int local_rank, int local_size);

}  // namespace hbm::memory
