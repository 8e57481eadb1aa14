#include "box/transport/stream_transport.h"

#include <utility>

namespace hbm::transport {

StreamTransport::StreamTransport(smb::TransportKind transport, std::unique_ptr<Lanes> lanes)
    : transport_(transport), lanes_(std::move(lanes)) {}

StreamTransport::~StreamTransport() {
  // A child has none of the threads, and must not shut down the sockets that it shares.
  if (fork_.in_child()) static_cast<void>(lanes_.release());
}

void StreamTransport::post(TransportRequest& work) {
  require_owner();
  lanes_->post(work);
}

void StreamTransport::progress(std::chrono::nanoseconds most) {
  require_owner();
  lanes_->progress(most);
}

void StreamTransport::wake() noexcept {
  if (!fork_.in_child()) lanes_->wake();
}

bool StreamTransport::alive() const noexcept { return !fork_.in_child() && lanes_->alive(); }

void StreamTransport::require_owner() const {
  if (!fork_.in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              "a forked child cannot use its parent's connection to a memory box; connect again in "
              "the child");
}

}  // namespace hbm::transport
