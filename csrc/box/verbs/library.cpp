#include "box/verbs/common/library.h"

#include <infiniband/verbs.h>

#include "box/verbs/client/verbs_transport.h"
#include "box/verbs/server/verbs_listener.h"

namespace hbm::verbs {
namespace {

OpenListener open_door(box::RequestHandler& handler, const VerbsListenerOptions& options) {
  require_own_devices();
  auto door = std::make_unique<VerbsListener>(handler, options);
  const uint16_t port = door->port();
  return {std::move(door), port};
}

constexpr Library kLibrary{kAbi, why_not_here, open_link, open_door};

}  // namespace
}  // namespace hbm::verbs

extern "C" __attribute__((visibility("default"))) const hbm::verbs::Library* hbm_verbs_library() {
  // Before anything is registered: a fork must not take registered pages away from the device.
  static const int fork_safe = ibv_fork_init();
  static_cast<void>(fork_safe);
  return &hbm::verbs::kLibrary;
}
