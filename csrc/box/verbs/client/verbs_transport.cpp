#include "box/verbs/client/verbs_transport.h"

#include <chrono>
#include <utility>

#include "base/error.h"
#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"

namespace hbm::verbs {
namespace {

constexpr std::chrono::seconds kResolve{2};
constexpr uint32_t kMostLanes = 16;

}  // namespace

VerbsTransport::VerbsTransport(std::unique_ptr<Wire> wire) : wire_(std::move(wire)) {}

VerbsTransport::~VerbsTransport() {
  if (fork_.in_child()) static_cast<void>(wire_.release());
}

void VerbsTransport::require_owner() const {
  fork_.require_owner("use its parent's queue pairs to a memory box; connect again in the child");
}

void VerbsTransport::post(transport::TransportRequest& work) {
  require_owner();
  wire_->post(work);
}

void VerbsTransport::progress(std::chrono::nanoseconds most) {
  require_owner();
  wire_->progress(most);
}

void VerbsTransport::wake() noexcept {
  if (!fork_.in_child()) wire_->wake();
}

bool VerbsTransport::alive() const noexcept { return !fork_.in_child() && wire_->alive(); }

std::shared_ptr<void> VerbsTransport::adopt(std::byte* memory, uint64_t bytes) {
  require_owner();
  return wire_->adopt(memory, bytes);
}

transport::OpenedTransport open_link(const transport::TransportOptions& opening) {
  if (opening.lanes == 0 || opening.lanes > kMostLanes) {
    throw Error(ErrorKind::kInvalid, "lanes is " + std::to_string(opening.lanes) +
                                         "; the verbs transport takes 1 to " +
                                         std::to_string(kMostLanes) + " queue pairs");
  }
  require_own_devices();
  const smb::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;
  const smb::Address address{opening.host, opening.port, {}};
  auto stream = std::make_unique<smb::FrameStream>(smb::connect_to(address, deadline));
  const smb::Joined joined =
      transport::join_box(*stream, address.host_and_port(), opening.join, opening.token, deadline);
  if (joined.verbs_port == 0) {
    throw Error(ErrorKind::kUnavailable, "the memory box at " + address.host_and_port() +
                                             " lets no client in over RDMA; its log says why");
  }
  auto wire = std::make_unique<Wire>(opening, joined, std::move(stream), deadline);
  return {std::make_unique<VerbsTransport>(std::move(wire)), joined};
}

std::string why_not_here(const std::string& host, uint16_t port) {
  try {
    require_own_devices();
    if (first_device() == nullptr) return "this host has no RDMA device";
    if (host.empty()) return {};
    const Connector connector(host, port, std::chrono::steady_clock::now() + kResolve);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace hbm::verbs
