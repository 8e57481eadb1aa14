#include "memory/room.h"

#include <algorithm>
#include <limits>

#include "memory/control_group.h"
#include "memory/system_memory.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kMarginBytes = uint64_t{32} << 20;
constexpr uint64_t kMarginDivisor = 128;

uint64_t less_margin(uint64_t free, uint64_t total) {
  const uint64_t margin = kMarginBytes + total / kMarginDivisor;
  return free > margin ? free - margin : 0;
}

uint64_t node_room(int node) {
  const MemInfo info = MemInfo::of_node(node);
  return less_margin(free_bytes(info), info.bytes("MemTotal"));
}

}  // namespace

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
  const MemInfo info = MemInfo::of_machine();
  const GroupLimit group = group_limit();
  return std::min(less_margin(info.bytes("MemAvailable"), info.bytes("MemTotal")),
                  less_margin(group.room, std::min(group.bytes, info.bytes("MemTotal"))));
}

uint64_t shared_room() { return std::min(machine_room(), overcommit_room(MemInfo::of_machine())); }

}  // namespace hbm::memory
