#include "memory/cpu_binding.h"

#include <array>

#include "base/error.h"
#include "memory/libraries.h"

namespace hbm::memory {

BindMode parse_bind_mode(const std::string& name) {
  constexpr std::array<const char*, 4> kNames = {"none", "core", "numa", "auto"};
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<BindMode>(i);
  }
  throw Error(ErrorKind::kInvalid,
              "bind mode \"" + name + "\" is not one of none, core, numa and auto");
}

std::string bind(BindMode mode, int local_rank, int local_size) {
  return libraries().bind(mode, local_rank, local_size);
}

}  // namespace hbm::memory
