#include "memory/room.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>

#include "memory/control_group.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

uint64_t less_margin(uint64_t free, uint64_t total) {
  const uint64_t margin = kFreeMarginBytes + total / kFreeMarginDivisor;
  return free > margin ? free - margin : 0;
}

uint64_t machine_room(const MemInfo& info) {
  const GroupLimit group = group_limit();
  return std::min(less_margin(info.bytes("MemAvailable"), info.bytes("MemTotal")),
                  less_margin(group.room, std::min(group.bytes, info.bytes("MemTotal"))));
}

uint64_t read_shared_room() {
  const MemInfo info = MemInfo::of_machine();
  return std::min(machine_room(info), overcommit_room(info));
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

uint64_t machine_room() { return machine_room(MemInfo::of_machine()); }

uint64_t shared_room(uint64_t bytes) {
  using Clock = std::chrono::steady_clock;
  static std::mutex mutex;
  static Clock::time_point read_at;  // mutex guards these three
  static uint64_t found = 0;
  static uint64_t granted = 0;
  // Another thread may have held the lock when this process was forked.
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return read_shared_room();
  const Clock::time_point now = Clock::now();
  const uint64_t shared = std::min(found / kUncheckedRoomDivisor, kLargestUncheckedBytes);
  if (bytes > shared || granted > shared - bytes || now - read_at >= kRoomReadingLifetime) {
    found = read_shared_room();
    read_at = now;
    granted = 0;
  }
  const uint64_t room = found - std::min(found, granted);
  granted += bytes;
  return room;
}

}  // namespace hbm::memory
