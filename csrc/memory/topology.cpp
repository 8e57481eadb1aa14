#include "memory/topology.h"

#include <array>

#include "memory/libraries.h"
#include "memory/policy.h"
#include "memory/room.h"

namespace hbm::memory {

const char* memory_mode_name(MemoryMode mode) noexcept {
  constexpr std::array<const char*, 5> kNames = {"none", "flat", "cache", "hybrid", "hbm-only"};
  return kNames[static_cast<size_t>(mode)];
}

Topology discover() {
  Topology found = libraries().discover(why_unavailable(Policy::kBind));
  for (NodeInfo& node : found.nodes) node.room_bytes = room_on({node.id}, false);
  return found;
}

}  // namespace hbm::memory
