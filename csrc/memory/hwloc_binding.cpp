#include <sched.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "base/error.h"
#include "memory/hwloc_topology.h"

namespace hbm::memory {
namespace {

struct FreeBitmap {
  void operator()(hwloc_bitmap_t set) const noexcept { hwloc_bitmap_free(set); }
};
using CpuSet = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

CpuSet empty_set() {
  CpuSet set(hwloc_bitmap_alloc());
  if (set == nullptr) throw std::bad_alloc();
  return set;
}

CpuSet copy_of(hwloc_const_bitmap_t other) {
  CpuSet set(hwloc_bitmap_dup(other));
  if (set == nullptr) throw std::bad_alloc();
  return set;
}

CpuSet current_cpus(hwloc_topology_t topology) {
  CpuSet set = empty_set();
  if (hwloc_get_cpubind(topology, set.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string("cannot read the CPUs that this process may use: ") + std::strerror(errno));
  }
  return set;
}

// The CPUs that this process was allowed before bind() narrowed them. A second bind() in one
// process chooses from the same CPUs as the first.
struct Narrowed {
  CpuSet before;
  CpuSet after;
};
Narrowed narrowed;

CpuSet allowed_cpus(hwloc_topology_t topology) {
  CpuSet current = current_cpus(topology);
  const bool ours =
      narrowed.after != nullptr && hwloc_bitmap_isequal(current.get(), narrowed.after.get());
  return ours ? copy_of(narrowed.before.get()) : std::move(current);
}

// Returns the allowed CPUs of each core, or of each NUMA node with CPUs, in the machine's order.
std::vector<CpuSet> parts(hwloc_topology_t topology, hwloc_obj_type_t type,
                          hwloc_const_bitmap_t allowed) {
  std::vector<CpuSet> found;
  for (hwloc_obj_t object = hwloc_get_next_obj_by_type(topology, type, nullptr); object != nullptr;
       object = hwloc_get_next_obj_by_type(topology, type, object)) {
    if (type == HWLOC_OBJ_NUMANODE && !owns_cpus(topology, object)) continue;
    CpuSet part = copy_of(object->cpuset);
    hwloc_bitmap_and(part.get(), part.get(), allowed);
    if (!hwloc_bitmap_iszero(part.get())) found.push_back(std::move(part));
  }
  return found;
}

std::string describe_nodes(hwloc_topology_t topology, hwloc_const_bitmap_t cpus) {
  CpuSet nodes = empty_set();
  hwloc_cpuset_to_nodeset(topology, cpus, nodes.get());
  return (hwloc_bitmap_weight(nodes.get()) == 1 ? "NUMA node " : "NUMA nodes ") +
         list_of(nodes.get());
}

std::string describe_unbound(hwloc_topology_t topology) {
  CpuSet here = empty_set();
  hwloc_bitmap_set(here.get(), static_cast<unsigned>(sched_getcpu()));
  return "not bound: CPUs " + list_of(current_cpus(topology).get()) + " allowed, now on " +
         describe_nodes(topology, here.get());
}

}  // namespace

std::string bind_by_hwloc(BindMode mode, int local_rank, int local_size) {
  if (local_rank < 0 || local_rank >= local_size) {
    throw Error(ErrorKind::kInvalid, "cannot bind local rank " + std::to_string(local_rank) +
                                         " of " + std::to_string(local_size) +
                                         ": a local rank is from 0 to the local size less 1");
  }
  const HwlocTopology topology = load_hwloc();
  if (mode == BindMode::kNone) return describe_unbound(topology.get());

  const bool by_core = mode == BindMode::kCore;
  CpuSet allowed = allowed_cpus(topology.get());
  const std::vector<CpuSet> choices =
      parts(topology.get(), by_core ? HWLOC_OBJ_CORE : HWLOC_OBJ_NUMANODE, allowed.get());
  const size_t ranks = static_cast<size_t>(local_size);
  if (choices.empty() || (by_core && ranks > choices.size())) {
    throw Error(
        ErrorKind::kInvalid,
        "cannot bind " + std::to_string(ranks) + " local ranks to " +
            std::to_string(choices.size()) + (by_core ? " cores" : " NUMA nodes") + " (CPUs " +
            list_of(allowed.get()) +
            " allowed): start fewer ranks, allow more CPUs, or bind by \"numa\" or \"none\"");
  }
  const size_t index = static_cast<size_t>(local_rank) * choices.size() / ranks;
  hwloc_const_bitmap_t cpus = choices[index].get();
  if (hwloc_set_cpubind(topology.get(), cpus, HWLOC_CPUBIND_PROCESS) != 0) {
    throw Error(ErrorKind::kUnavailable,
                "cannot bind this process to CPUs " + list_of(cpus) + ": " + std::strerror(errno));
  }
  narrowed = {.before = std::move(allowed), .after = copy_of(cpus)};
  const std::string nodes = describe_nodes(topology.get(), cpus);
  if (!by_core) return nodes + " (CPUs " + list_of(cpus) + ")";
  return "one core (CPUs " + list_of(cpus) + ") on " + nodes;
}

}  // namespace hbm::memory
