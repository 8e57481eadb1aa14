#include "memory/kinds.h"

#include <numa.h>

#include <cstdlib>

#include "base/error.h"

namespace hbm::memory {
namespace {

std::string describe(int code) {
  char text[MEMKIND_ERROR_MESSAGE_SIZE];
  memkind_error_message(code, text, sizeof(text));
  return text;
}

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(" ") + name + "=" + value;
}

}  // namespace

memkind_t kind_of(Policy policy) noexcept {
  switch (policy) {
    case Policy::kPreferred:
      return MEMKIND_HBW_PREFERRED;
    case Policy::kBind:
      return MEMKIND_HBW;
    case Policy::kInterleave:
      return MEMKIND_HBW_INTERLEAVE;
    case Policy::kDdr:
      break;
  }
  return MEMKIND_DEFAULT;
}

std::string why_unavailable(memkind_t kind) {
  const int code = memkind_check_available(kind);
  return code == MEMKIND_SUCCESS ? std::string() : describe(code);
}

std::string why_unavailable_or_throw(memkind_t kind) {
  if (memkind_check_available(kind) == MEMKIND_ERROR_ENVIRON) {
    throw Error(ErrorKind::kInvalid,
                "memkind rejects its environment:" + setting("MEMKIND_HBW_NODES") +
                    setting("MEMKIND_HBW_THRESHOLD") + "; this machine has NUMA nodes 0 to " +
                    std::to_string(numa_max_node()));
  }
  return why_unavailable(kind);
}

}  // namespace hbm::memory
