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

namespace hbm::box::verbs {
namespace {

transport::OpenedTransport open_verbs(const transport::TransportOptions& given) {
  transport::TransportOptions opening = given;
  opening.join = transport::authenticated_join(given);
  if (opening.connections == 0 || opening.connections > common::kMostQueuePairs) {
    throw Error(ErrorKind::kInvalid, "lanes is " + std::to_string(opening.connections) +
                                         "; the verbs transport takes 1 to " +
                                         std::to_string(common::kMostQueuePairs) + " queue pairs");
  }
  common::require_own_devices();
  const protocol::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;
  const protocol::Address address{opening.host, opening.port, {}};
  auto stream = std::make_unique<protocol::FrameStream>(protocol::connect_to(address, deadline));
  const protocol::Joined joined =
      transport::join_box(*stream, address.host_and_port(), opening.join, opening.token, deadline);
  if (joined.verbs_port == 0) {
    throw Error(ErrorKind::kUnavailable, "the memory box at " + address.host_and_port() +
                                             " serves no clients over RDMA; its log says why at "
                                             "the level info (HBMCOMM_LOG=info)");
  }
  return {std::make_unique<client::VerbsTransport>(opening, joined, std::move(stream), deadline),
          joined};
}

server::OpenedListener listen(box::server::RequestHandler& handler,
                              const server::VerbsListenerOptions& options) {
  common::require_own_devices();
  auto listener = std::make_unique<server::VerbsListener>(handler, options);
  const uint16_t port = listener->port();
  return {std::move(listener), port};
}

std::string why_no_device() {
  try {
    common::require_own_devices();
    return common::first_device() == nullptr ? "this host has no RDMA device" : "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string why_no_route(const std::string& host, uint16_t port) {
  if (std::string cause = why_no_device(); !cause.empty()) return cause;
  try {
    const client::Connector connector(host, port,
                                      std::chrono::steady_clock::now() + common::kResolveTimeout);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// Called before memory is registered, so that a fork does not replace the pages that the device
// uses.
void prepare_for_forks() {
  static const int fork_safe = ibv_fork_init();
  static_cast<void>(fork_safe);
}

constexpr client::ClientLibrary kClientLibrary{common::kAbi, why_no_route, open_verbs};
constexpr server::ServerLibrary kServerLibrary{common::kAbi, why_no_device, listen};

}  // namespace
}  // namespace hbm::box::verbs

extern "C" __attribute__((visibility("default"))) const void* hbm_verbs_client() {
  hbm::box::verbs::prepare_for_forks();
  return &hbm::box::verbs::kClientLibrary;
}

extern "C" __attribute__((visibility("default"))) const void* hbm_verbs_server() {
  hbm::box::verbs::prepare_for_forks();
  return &hbm::box::verbs::kServerLibrary;
}
