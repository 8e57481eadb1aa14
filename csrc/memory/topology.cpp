#include "memory/topology.h"

#include <array>

#include "memory/libraries.h"
#include "memory/policy.h"

namespace hbm::memory {

const char* memory_mode_name(MemoryMode mode) noexcept {
  constexpr std::array<const char*, 4> kNames = {"none", "flat", "cache", "hybrid"};
  return kNames[static_cast<size_t>(mode)];
}

Topology discover() { return libraries().discover(why_unavailable(Policy::kBind)); }

}  // namespace hbm::memory
