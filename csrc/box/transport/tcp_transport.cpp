// Implements open_tcp(): opens several connections that join one session.
#include <string>

#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"
#include "box/transport/stream_transport.h"
#include "box/transport/tuning.h"

namespace hbm::box::transport {
namespace {

void require_connections(uint32_t connections) {
  if (connections >= 1 && connections <= kMostConnections) return;
  throw Error(ErrorKind::kInvalid, "lanes is " + std::to_string(connections) +
                                       "; the tcp transport takes 1 to " +
                                       std::to_string(kMostConnections) + " connections");
}

}  // namespace

OpenedTransport open_tcp(const TransportOptions& opening) {
  require_connections(opening.connections);
  const protocol::Address address{opening.host, opening.port, {}};
  const std::string box = address.host_and_port();
  const protocol::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;

  OpenedTransport opened;
  protocol::Join join = authenticated_join(opening);
  std::vector<std::unique_ptr<protocol::FrameStream>> streams;
  for (uint32_t index = 0; index < opening.connections; ++index) {
    streams.push_back(
        std::make_unique<protocol::FrameStream>(protocol::connect_to(address, deadline)));
    const protocol::Joined joined = join_box(*streams.back(), box, join, opening.token, deadline);
    if (index == 0) opened.joined = joined;
    if (joined.generation != opened.joined.generation) {
      throw Error(ErrorKind::kNetwork, "the connections of a tcp transport to the memory box at " +
                                           box +
                                           " met two boxes; it was restarted just now, or several "
                                           "share the name");
    }
    join.session = joined.session;
    join.flags |= protocol::Join::kFurtherConnection;
  }
  opened.transport = std::make_unique<StreamTransport>(protocol::TransportKind::kTcp,
                                                       std::move(streams), box, nullptr);
  return opened;
}

}  // namespace hbm::box::transport
