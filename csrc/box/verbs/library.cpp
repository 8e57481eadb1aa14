// The exports of libhbm_verbs.so: a table for clients and one for servers.
#include <infiniband/verbs.h>

#include <chrono>
#include <utility>

#include "base/error.h"
#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"
#include "box/verbs/client/connector.h"
#include "box/verbs/client/library.h"
#include "box/verbs/client/verbs_transport.h"
#include "box/verbs/common/load_library.h"
#include "box/verbs/common/tuning.h"
#include "box/verbs/server/library.h"
#include "box/verbs/server/verbs_listener.h"

namespace hbm::verbs {
namespace {

transport::OpenedTransport open_verbs(const transport::TransportOptions& given) {
  transport::TransportOptions opening = given;
  opening.join = transport::sealed_join(given);
  if (opening.lanes == 0 || opening.lanes > kMostQueuePairs) {
    throw Error(ErrorKind::kInvalid, "lanes is " + std::to_string(opening.lanes) +
                                         "; the verbs transport takes 1 to " +
                                         std::to_string(kMostQueuePairs) + " queue pairs");
  }
  require_own_devices();
  const smb::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;
  const smb::Address address{opening.host, opening.port, {}};
  auto stream = std::make_unique<smb::FrameStream>(smb::connect_to(address, deadline));
  const smb::Joined joined =
      transport::join_box(*stream, address.host_and_port(), opening.join, opening.token, deadline);
  if (joined.verbs_port == 0) {
    throw Error(ErrorKind::kUnavailable, "the memory box at " + address.host_and_port() +
                                             " lets no client in over RDMA; its log says why at "
                                             "the level info (HBMCOMM_LOG=info)");
  }
  return {std::make_unique<VerbsTransport>(opening, joined, std::move(stream), deadline), joined};
}

OpenedListener listen(box::RequestHandler& handler, const VerbsListenerOptions& options) {
  require_own_devices();
  auto listener = std::make_unique<VerbsListener>(handler, options);
  const uint16_t port = listener->port();
  return {std::move(listener), port};
}

std::string why_no_device() {
  try {
    require_own_devices();
    return first_device() == nullptr ? "this host has no RDMA device" : "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string why_no_route(const std::string& host, uint16_t port) {
  if (std::string cause = why_no_device(); !cause.empty()) return cause;
  try {
    const Connector connector(host, port, std::chrono::steady_clock::now() + kResolveTimeout);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// Called before anything is registered: a fork must not take registered pages away from the device.
void prepare_for_forks() {
  static const int fork_safe = ibv_fork_init();
  static_cast<void>(fork_safe);
}

constexpr ClientLibrary kClientLibrary{kAbi, why_no_route, open_verbs};
constexpr ServerLibrary kServerLibrary{kAbi, why_no_device, listen};

}  // namespace
}  // namespace hbm::verbs

extern "C" __attribute__((visibility("default"))) const void* hbm_verbs_client() {
  hbm::verbs::prepare_for_forks();
  return &hbm::verbs::kClientLibrary;
}

extern "C" __attribute__((visibility("default"))) const void* hbm_verbs_server() {
  hbm::verbs::prepare_for_forks();
  return &hbm::verbs::kServerLibrary;
}
