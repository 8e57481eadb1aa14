#include <sched.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "base/error.h"
#include "memory/hwloc_topology.h"

namespace hbm::memory {
namespace {

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

// Returns the allowed CPUs of each object of a type, in the machine's order. Leaves out NUMA nodes
// without CPUs of their own.
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

// A rank's share of parts: of several parts, which it has alone, or of one part, which `size` ranks
// have, this one as number `rank`.
struct Share {
  size_t first;
  size_t last;  // exclusive
  size_t rank = 0;
  size_t size = 1;
};

Share share_of(size_t parts, size_t rank, size_t size) {
  if (size <= parts) return {rank * parts / size, (rank + 1) * parts / size};
  const size_t part = rank * parts / size;
  const auto first_of = [&](size_t which) { return (which * size + parts - 1) / parts; };
  return {part, part + 1, rank - first_of(part), first_of(part + 1) - first_of(part)};
}

CpuSet joined(const std::vector<CpuSet>& parts, const Share& share) {
  CpuSet all = empty_set();
  for (size_t i = share.first; i < share.last; ++i) {
    hwloc_bitmap_or(all.get(), all.get(), parts[i].get());
  }
  return all;
}

// Returns the CPUs of kAuto. If the process may use CPUs of a node whose memory its cpuset forbids,
// hwloc does not show this node. The allowed CPUs then count as one node. REQUIRES: some CPUs are
// allowed.
CpuSet part_of_machine(hwloc_topology_t topology, hwloc_const_bitmap_t allowed, size_t rank,
                       size_t size) {
  std::vector<CpuSet> nodes = parts(topology, HWLOC_OBJ_NUMANODE, allowed);
  const CpuSet shown = joined(nodes, {0, nodes.size()});
  if (!hwloc_bitmap_isincluded(allowed, shown.get())) {
    nodes.clear();
    nodes.push_back(copy_of(allowed));
  }
  const Share of_nodes = share_of(nodes.size(), rank, size);
  CpuSet cpus = joined(nodes, of_nodes);
  if (of_nodes.size == 1) return cpus;
  const std::vector<CpuSet> caches = parts(topology, HWLOC_OBJ_L3CACHE, cpus.get());
  if (caches.size() < 2) return cpus;
  return joined(caches, share_of(caches.size(), of_nodes.rank, of_nodes.size));
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

CpuSet current_cpus(hwloc_topology_t topology) {
  CpuSet set = empty_set();
  if (hwloc_get_cpubind(topology, set.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string("cannot read the CPUs that this process may use: ") + std::strerror(errno));
  }
  return set;
}

std::string bind_by_hwloc(BindMode mode, int local_rank, int local_size) {
  if (local_rank < 0 || local_rank >= local_size) {
    throw Error(ErrorKind::kInvalid, "cannot bind local rank " + std::to_string(local_rank) +
                                         " of " + std::to_string(local_size) +
                                         ": a local rank is from 0 to the local size less 1");
  }
  const HwlocTopology topology = load_hwloc();
  if (mode == BindMode::kNone) return describe_unbound(topology.get());

  CpuSet allowed = allowed_cpus(topology.get());
  const bool by_core = mode == BindMode::kCore;
  const std::vector<CpuSet> choices =
      parts(topology.get(), by_core ? HWLOC_OBJ_CORE : HWLOC_OBJ_NUMANODE, allowed.get());
  const size_t ranks = static_cast<size_t>(local_size);
  if (choices.empty() || (by_core && ranks > choices.size())) {
    throw Error(ErrorKind::kInvalid,
                "cannot bind " + std::to_string(ranks) + " local ranks to " +
                    std::to_string(choices.size()) + (by_core ? " cores" : " NUMA nodes") +
                    " (CPUs " + list_of(allowed.get()) +
                    " allowed): start fewer ranks, allow more CPUs, or bind by " +
                    (by_core ? "\"auto\" or " : "") + "\"none\"");
  }
  const size_t rank = static_cast<size_t>(local_rank);
  const CpuSet chosen = mode == BindMode::kAuto
                            ? part_of_machine(topology.get(), allowed.get(), rank, ranks)
                            : copy_of(choices[rank * choices.size() / ranks].get());
  hwloc_const_bitmap_t cpus = chosen.get();
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
