#include "memory/capacity.h"

#include <numa.h>
#include <numaif.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.h"

namespace hbm::memory {

uint64_t free_bytes(const MemInfo& node) {
  return node.bytes("MemFree") + (node.bytes("Active(file)") + node.bytes("Inactive(file)")) / 2;
}

uint64_t node_free_bytes(int node) { return free_bytes(MemInfo::of_node(node)); }

uint64_t nodes_total(const std::vector<int>& nodes) {
  uint64_t sum = 0;
  for (int node : nodes) sum += MemInfo::of_node(node).bytes("MemTotal");
  return sum;
}

uint64_t machine_total() { return MemInfo::of_machine().bytes("MemTotal"); }

uint64_t overcommit_room(const MemInfo& machine) {
  constexpr int kHeuristic = 0;
  constexpr int kNever = 2;
  int mode = kHeuristic;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  if (mode == kNever) {
    const uint64_t limit = machine.bytes("CommitLimit");
    const uint64_t promised = machine.bytes("Committed_AS");
    return limit > promised ? limit - promised : 0;
  }
  if (mode == kHeuristic) return machine.bytes("MemTotal") + machine.bytes("SwapTotal");
  return std::numeric_limits<uint64_t>::max();
}

std::vector<int> block_nodes(const void* block) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  int mode = 0;
  if (get_mempolicy(&mode, mask.data(), NUMA_NUM_NODES, const_cast<void*>(block), MPOL_F_ADDR) !=
      0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("get_mempolicy cannot tell which NUMA nodes a block comes from: ") +
                    std::strerror(errno) + "; a container needs the capability SYS_NICE for it");
  }
  std::vector<int> nodes;
  for (size_t node = 0; node < NUMA_NUM_NODES; ++node) {
    if ((mask[node / kBits] >> (node % kBits)) & 1) nodes.push_back(static_cast<int>(node));
  }
  return nodes;
}

}  // namespace hbm::memory
