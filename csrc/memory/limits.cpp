#include "memory/limits.h"

#include <sys/resource.h>

#include <limits>

#include "base/error.h"
#include "memory/capacity.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// As overcommit_room(); no bound where the kernel's figures cannot be read.
uint64_t known_overcommit_room() {
  try {
    return overcommit_room(MemInfo::of_machine());
  } catch (const Error&) {
    return kUnlimited;
  }
}

}  // namespace

uint64_t soft_limit(int resource) noexcept {
  rlimit limit{};
  const bool limited = getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? limit.rlim_cur : kUnlimited;
}

std::string limit_text(int resource, const char* name) {
  const uint64_t limit = soft_limit(resource);
  return limit == kUnlimited ? "" : "; " + std::string(name) + " is " + std::to_string(limit);
}

std::string bounds_of_mappings(uint64_t bytes) {
  std::string text = limit_text(RLIMIT_AS, "RLIMIT_AS") + limit_text(RLIMIT_DATA, "RLIMIT_DATA");
  if (!text.empty()) text += " (ulimit -v, ulimit -d)";
  const uint64_t room = known_overcommit_room();
  if (bytes > room) {
    text += "; the kernel's setting vm.overcommit_memory lets no more than " +
            std::to_string(room) + " be mapped";
  }
  if (text.empty()) {
    text =
        "; the address space may be too short, or the process has too many mappings "
        "(vm.max_map_count)";
  }
  return text;
}

}  // namespace hbm::memory
