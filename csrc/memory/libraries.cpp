// The table of linked libraries: see libraries.h.
#include "memory/libraries.h"

#include <numa.h>

#include "memory/hwloc_topology.h"

namespace hbm::memory {
namespace {

memkind_t kind(Policy policy) noexcept {
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

}  // namespace

const Libraries& libraries() {
  static constexpr Libraries kLinked{
      .abi = Libraries::kAbi,
      .kind_of = kind,
      .check_available = memkind_check_available,
      .create_fixed = memkind_create_fixed,
      .destroy_kind = memkind_destroy_kind,
      .error_message = memkind_error_message,
      .free = memkind_free,
      .get_version = memkind_get_version,
      .posix_memalign = memkind_posix_memalign,
      .numa_max_node = numa_max_node,
      .discover = discover_by_hwloc,
      .bind = bind_by_hwloc,
  };
  return kLinked;
}

}  // namespace hbm::memory
