#include "memory/hwloc_topology.h"

#include <numa.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "base/error.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

using NodeMask = std::unique_ptr<bitmask, decltype(&numa_bitmask_free)>;

hwloc_obj_t next_node(hwloc_topology_t topology, hwloc_obj_t previous) {
  return hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, previous);
}

// Returns the bandwidth of memkind's rule: a node is high-bandwidth memory if some CPUs reach it
// with this bandwidth or more.
uint64_t bandwidth_threshold() {
  const char* value = std::getenv("MEMKIND_HBW_THRESHOLD");
  return value == nullptr || *value == '\0' ? kLeastHbmBandwidth
                                            : std::strtoull(value, nullptr, 10);
}

bool is_fast(hwloc_topology_t topology, hwloc_obj_t node) {
  const uint64_t threshold = bandwidth_threshold();
  for (hwloc_obj_t from = next_node(topology, nullptr); from != nullptr;
       from = next_node(topology, from)) {
    hwloc_location initiator;
    initiator.type = HWLOC_LOCATION_TYPE_CPUSET;
    initiator.location.cpuset = from->cpuset;
    hwloc_uint64_t bandwidth = 0;
    if (hwloc_memattr_get_value(topology, HWLOC_MEMATTR_ID_BANDWIDTH, node, &initiator, 0,
                                &bandwidth) == 0 &&
        bandwidth >= threshold) {
      return true;
    }
  }
  return false;
}

bool is_mcdram(hwloc_obj_t node) {
  return node->subtype != nullptr && std::strcmp(node->subtype, "MCDRAM") == 0;
}

// Sets the fields of `found` that are about HBM. If memkind has found HBM, asks the same sources as
// memkind, in memkind's order.
void find_hbm(hwloc_topology_t topology, const std::string& why_no_hbm, Topology& found) {
  found.hbm_available = why_no_hbm.empty();
  if (!found.hbm_available) {
    found.hbm_source = "memkind: " + why_no_hbm;
    return;
  }
  NodeMask named(nullptr, numa_bitmask_free);
  const char* setting = std::getenv("MEMKIND_HBW_NODES");
  if (setting != nullptr && *setting != '\0') named.reset(numa_parse_nodestring(setting));

  bool mcdram = false;
  for (NodeInfo& node : found.nodes) {
    hwloc_obj_t object =
        hwloc_get_numanode_obj_by_os_index(topology, static_cast<unsigned>(node.id));
    if (named != nullptr) {
      node.is_hbm = numa_bitmask_isbitset(named.get(), static_cast<unsigned>(node.id)) != 0;
    } else if (is_mcdram(object)) {
      node.is_hbm = mcdram = true;
    } else {
      node.is_hbm = is_fast(topology, object);
    }
  }
  if (named != nullptr) {
    found.hbm_source = std::string("memkind, by MEMKIND_HBW_NODES=") + setting;
  } else if (mcdram) {
    found.hbm_source = "memkind, by CPUID (Xeon Phi)";
  } else {
    found.hbm_source =
        "memkind, by HMAT: nodes of at least " + std::to_string(bandwidth_threshold()) + " MiB/s";
  }
}

void find_mode(hwloc_topology_t topology, Topology& found) {
  const bool cache = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_MEMCACHE) > 0;
  const bool nodes = found.hbm_available;
  // A node without memory counts as neither kind.
  const auto has = [&](bool hbm) {
    return std::ranges::any_of(found.nodes, [hbm](const NodeInfo& node) {
      return node.is_hbm == hbm && node.total_bytes > 0;
    });
  };
  const bool only = nodes && has(true) && !has(false);
  if (nodes) {
    found.mode = only ? MemoryMode::kOnly : cache ? MemoryMode::kHybrid : MemoryMode::kFlat;
  } else {
    found.mode = cache ? MemoryMode::kCache : MemoryMode::kNone;
  }
  const std::string hbm = only ? "HBM nodes alone" : nodes ? "HBM nodes" : "no HBM nodes";
  found.mode_source = hbm + " by memkind, " + (cache ? "a" : "no") + " memory-side cache by hwloc";
}

std::string describe_cluster(const Topology& found, int packages) {
  const auto with_cpus =
      std::count_if(found.nodes.begin(), found.nodes.end(), [](auto& n) { return n.has_cpus; });
  const auto a_socket = with_cpus / std::max(packages, 1);
  if (a_socket <= 1) return "1 (quadrant, all-to-all, or not clustered)";
  return std::to_string(a_socket) + " (SNC-" + std::to_string(a_socket) + ")";
}

int count_cpu_nodes(hwloc_topology_t topology) {
  const CpuSet allowed = current_cpus(topology);
  int count = 0;
  for (hwloc_obj_t node = next_node(topology, nullptr); node != nullptr;
       node = next_node(topology, node)) {
    count += owns_cpus(topology, node) && hwloc_bitmap_intersects(node->cpuset, allowed.get());
  }
  return count;
}

std::vector<int> closest_hbm(const Topology& found) {
  std::vector<int> closest;
  if (found.cpu_node < 0) return closest;
  int shortest = std::numeric_limits<int>::max();
  for (const NodeInfo& node : found.nodes) {
    if (!node.is_hbm) continue;
    const int distance = numa_distance(found.cpu_node, node.id);
    if (distance < shortest) closest.clear();
    if (distance <= shortest) closest.push_back(node.id);
    shortest = std::min(shortest, distance);
  }
  return closest;
}

}  // namespace

bool owns_cpus(hwloc_topology_t topology, hwloc_obj_t node) {
  if (hwloc_bitmap_iszero(node->cpuset)) return false;
  for (hwloc_obj_t other = next_node(topology, nullptr); other != nullptr;
       other = next_node(topology, other)) {
    if (other == node || !hwloc_bitmap_isincluded(other->cpuset, node->cpuset)) continue;
    if (hwloc_bitmap_iszero(other->cpuset)) continue;
    const bool same = hwloc_bitmap_isequal(other->cpuset, node->cpuset);
    if (!same || other->os_index < node->os_index) return false;
  }
  return true;
}

HwlocTopology load_hwloc() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw Error(ErrorKind::kUnavailable, "hwloc cannot start: out of memory");
  }
  HwlocTopology topology(raw);
  hwloc_topology_set_type_filter(raw, HWLOC_OBJ_MEMCACHE, HWLOC_TYPE_FILTER_KEEP_ALL);
  if (hwloc_topology_load(raw) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("hwloc cannot read this machine's topology: ") + std::strerror(errno));
  }
  return topology;
}

std::string list_of(hwloc_const_bitmap_t set) {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, set) < 0) throw std::bad_alloc();
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);
  return text;
}

Topology discover_by_hwloc(const std::string& why_no_hbm) {
  const HwlocTopology topology = load_hwloc();
  Topology found{};
  for (hwloc_obj_t node = next_node(topology.get(), nullptr); node != nullptr;
       node = next_node(topology.get(), node)) {
    const int id = static_cast<int>(node->os_index);
    const bool has_cpus = owns_cpus(topology.get(), node);
    found.nodes.push_back({.id = id,
                           .total_bytes = node->attr->numanode.local_memory,
                           .free_bytes = node_free_bytes(id),
                           .room_bytes = 0,
                           .is_hbm = false,
                           .has_cpus = has_cpus,
                           .cpus = has_cpus ? list_of(node->cpuset) : std::string()});
  }
  std::sort(found.nodes.begin(), found.nodes.end(),
            [](const NodeInfo& a, const NodeInfo& b) { return a.id < b.id; });
  find_hbm(topology.get(), why_no_hbm, found);
  find_mode(topology.get(), found);
  found.cluster =
      describe_cluster(found, hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_PACKAGE));
  found.cpu_node = numa_node_of_cpu(sched_getcpu());
  found.cpu_nodes = count_cpu_nodes(topology.get());
  found.closest_hbm = closest_hbm(found);
  return found;
}

}  // namespace hbm::memory
