// open_tcp(): lanes that join one session.
#include <string>

#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"
#include "box/transport/stream_transport.h"
#include "box/transport/tuning.h"

namespace hbm::transport {
namespace {

void require_lanes(uint32_t lanes) {
  if (lanes >= 1 && lanes <= kMostStreamLanes) return;
  throw Error(ErrorKind::kInvalid, "a tcp transport of " + std::to_string(lanes) +
                                       " lanes was asked for; choose 1 to " +
                                       std::to_string(kMostStreamLanes));
}

}  // namespace

OpenedTransport open_tcp(const TransportOptions& opening) {
  require_lanes(opening.lanes);
  const smb::Address address{opening.host, opening.port, {}};
  const std::string box = address.host_and_port();
  const smb::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;

  OpenedTransport opened;
  smb::Join join = sealed_join(opening);
  std::vector<std::unique_ptr<smb::FrameStream>> streams;
  for (uint32_t lane = 0; lane < opening.lanes; ++lane) {
    streams.push_back(std::make_unique<smb::FrameStream>(smb::connect_to(address, deadline)));
    const smb::Joined joined = join_box(*streams.back(), box, join, opening.token, deadline);
    if (lane == 0) opened.joined = joined;
    if (joined.box != opened.joined.box) {
      throw Error(ErrorKind::kNetwork, "the lanes of a tcp transport to the memory box at " + box +
                                           " met two boxes; it was restarted just now, or several "
                                           "share the name");
    }
    join.session = joined.session;
    join.flags |= smb::Join::kLane;
  }
  opened.transport =
      std::make_unique<StreamTransport>(smb::TransportKind::kTcp, std::move(streams), box, nullptr);
  return opened;
}

}  // namespace hbm::transport
