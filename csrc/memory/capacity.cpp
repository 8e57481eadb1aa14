#include "memory/capacity.h"

#include <numa.h>
#include <numaif.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kMarginBytes = uint64_t{32} << 20;
constexpr uint64_t kMarginDivisor = 128;

// The kernel's "key: n kB" tables: /proc/meminfo, and a node's, whose lines start "Node 0 ". One
// that does not exist is empty.
class MemInfo {
 public:
  explicit MemInfo(const std::string& path) {
    std::ifstream file(path);
    if (!file && errno != ENOENT) {
      throw Error(ErrorKind::kUnavailable,
                  "cannot tell how much memory is free: " + path + ": " + std::strerror(errno) +
                      (errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : ""));
    }
    for (std::string word, previous; file >> word; previous = word) {
      if (!previous.empty() && previous.back() == ':') entries_.push_back({previous, word});
    }
  }

  // 0 when the table has no such key.
  uint64_t bytes(const std::string& key) const {
    for (const auto& [name, kilobytes] : entries_) {
      if (name == key + ":") return std::stoull(kilobytes) * 1024;
    }
    return 0;
  }

 private:
  std::vector<std::pair<std::string, std::string>> entries_;
};

MemInfo node_info(int node) {
  return MemInfo("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
}

uint64_t free_bytes(const MemInfo& info) {
  return info.bytes("MemFree") + (info.bytes("Active(file)") + info.bytes("Inactive(file)")) / 2;
}

uint64_t less_margin(uint64_t free, uint64_t total) {
  const uint64_t margin = kMarginBytes + total / kMarginDivisor;
  return free > margin ? free - margin : 0;
}

uint64_t node_room(int node) {
  const MemInfo info = node_info(node);
  return less_margin(free_bytes(info), info.bytes("MemTotal"));
}

}  // namespace

uint64_t node_free_bytes(int node) { return free_bytes(node_info(node)); }

uint64_t room_on(const std::vector<int>& nodes, bool interleave) {
  uint64_t sum = 0;
  uint64_t smallest = std::numeric_limits<uint64_t>::max();
  for (int node : nodes) {
    const uint64_t room = node_room(node);
    sum += room;
    smallest = std::min(smallest, room);
  }
  return interleave && !nodes.empty() ? smallest * nodes.size() : sum;
}

uint64_t machine_room() {
  const MemInfo info("/proc/meminfo");
  return less_margin(info.bytes("MemAvailable"), info.bytes("MemTotal"));
}

uint64_t machine_total() { return MemInfo("/proc/meminfo").bytes("MemTotal"); }

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
