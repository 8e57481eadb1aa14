#include "box/client/dialer.h"

#include <chrono>
#include <utility>

#include "base/log.h"
#include "box/client/error.h"
#include "box/client/tuning.h"
#include "box/transport/transport.h"
#include "box/verbs/client/library.h"
#include "box/verbs/common/load_library.h"

namespace hbm::box::client {
namespace {

using protocol::TransportKind;

protocol::Address parse_one(const std::string& url) {
  const std::vector<protocol::Address> boxes = protocol::parse_url(url);
  if (boxes.size() == 1) return boxes.front();
  throw Error(ErrorKind::kInvalid, url + " names " + std::to_string(boxes.size()) +
                                       " boxes, and a client connects to one: make a client of "
                                       "each");
}

void require_shm(const protocol::Joined& probe) {
  const std::string obstacle = transport::why_no_shm(probe);
  if (!obstacle.empty()) throw Error(ErrorKind::kUnavailable, obstacle);
}

// Connects to the Unix socket of the box that `probe` reached.
transport::OpenedTransport open_socket_of(const protocol::Joined& probe,
                                          transport::TransportOptions opening) {
  opening.path = probe.socket_path;
  transport::OpenedTransport opened = transport::open_shm(opening);
  if (opened.joined.generation != probe.generation) {
    throw Error(ErrorKind::kUnavailable, opening.path + " is another box's on this machine");
  }
  return opened;
}

// Joins the box over TCP as a probe. Opens shm in the session that the probe began or resumed.
transport::OpenedTransport open_shm_by_tcp(transport::TransportOptions opening) {
  opening.connections = 1;
  const transport::OpenedTransport probe = transport::open_tcp(opening);
  require_shm(probe.joined);
  opening.join.session = probe.joined.session;
  return open_socket_of(probe.joined, opening);
}

std::string why_no_verbs(const transport::OpenedTransport& probe, const std::string& host) {
  if (probe.joined.verbs_port == 0) return "the box offers no RDMA";
  try {
    return verbs::common::load<verbs::client::ClientLibrary>().why_not(host,
                                                                       probe.joined.verbs_port);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

Dialer::Dialer(const ClientOptions& options)
    : choice_(options.transport),
      template_{.host = "",
                .port = 0,
                .path = "",
                .token = options.token,
                .seal = options.seal,
                .join = {},
                .connections = options.lanes,
                .timeout = options.connect_timeout},
      address_(parse_one(options.url)),
      read_only_(options.read_only) {
  if (address_.is_unix() && choice_ != TransportChoice::kAuto && choice_ != TransportChoice::kShm) {
    throw Error(ErrorKind::kInvalid, address_.url() +
                                         " is a Unix socket, which carries the transport shm "
                                         "alone; for another one name smb://host:port");
  }
}

transport::TransportOptions Dialer::opening(protocol::Id session,
                                            std::chrono::milliseconds timeout) const {
  transport::TransportOptions opening = template_;
  opening.host = address_.host;
  opening.port = address_.port;
  opening.path = address_.path;
  opening.timeout = timeout;
  opening.join.session = session;
  opening.join.flags = read_only_ ? protocol::Join::kReadOnlyClient : 0;
  return opening;
}

transport::OpenedTransport Dialer::dial() {
  const std::string target = choice_ == TransportChoice::kAuto
                                 ? box()
                                 : box() + " by the transport " + transport_name(choice_);
  try {
    transport::OpenedTransport opened = choose();
    log::info(box() + ": transport " + transport_name(transport_) + ": " + why_);
    return opened;
  } catch (const transport::Refused& refused) {
    failure(refused.status(), "cannot join the box at " + target, refused.what()).raise();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNetwork && error.kind() != ErrorKind::kUnavailable) throw;
    throw BoxError(BoxError::Cause::kUnreachable,
                   "cannot connect to the box at " + target + ": " + error.what());
  }
}

transport::OpenedTransport Dialer::choose() {
  const transport::TransportOptions first = opening({}, template_.timeout);
  const bool any = choice_ == TransportChoice::kAuto;
  if (address_.is_unix()) {
    transport_ = TransportKind::kShm;
    why_ = "the address is a Unix socket";
    return transport::open_shm(first);
  }
  if (choice_ == TransportChoice::kVerbs) {
    transport_ = TransportKind::kVerbs;
    why_ = "as asked for";
    return open_by(transport_, first);
  }

  transport::OpenedTransport probe = transport::open_tcp(first);
  if (choice_ == TransportChoice::kTcp) {
    why_ = "as asked for";
    return probe;
  }
  std::string obstacles;
  try {
    require_shm(probe.joined);
    leave(std::move(probe.transport), box());  // so the box has one session for this client
    transport::OpenedTransport opened = open_socket_of(probe.joined, first);
    transport_ = TransportKind::kShm;
    why_ = any ? "the box's Unix socket answers on the same kernel" : "as asked for";
    return opened;
  } catch (const Error& error) {
    if (!any) throw;
    obstacles = std::string("not shm: ") + error.what();
  }
  if (!probe.transport) probe = transport::open_tcp(first);

  std::string obstacle = why_no_verbs(probe, address_.host);
  if (obstacle.empty()) {
    try {
      transport::OpenedTransport opened = open_by(TransportKind::kVerbs, first);
      leave(std::move(probe.transport), box());
      transport_ = TransportKind::kVerbs;
      why_ = "a route resolves on an RDMA device; " + obstacles;
      return opened;
    } catch (const Error& error) {
      obstacle = error.what();
    }
  }
  why_ = obstacles + "; not verbs: " + obstacle;
  return probe;
}

transport::OpenedTransport Dialer::open_by(TransportKind transport,
                                           const transport::TransportOptions& opening) {
  switch (transport) {
    case TransportKind::kShm:
      return address_.is_unix() ? transport::open_shm(opening) : open_shm_by_tcp(opening);
    case TransportKind::kTcp:
      return transport::open_tcp(opening);
    case TransportKind::kVerbs:
      return verbs::common::load<verbs::client::ClientLibrary>().open(opening);
  }
  throw Error(ErrorKind::kUnsupported, "no such transport");
}

transport::OpenedTransport Dialer::dial_again(protocol::Id session,
                                              std::chrono::milliseconds timeout) {
  return open_by(transport_, opening(session, timeout));
}

void leave(std::unique_ptr<transport::Transport> transport, const std::string& box) {
  transport::TransportRequest request;
  request.opcode = protocol::Opcode::kLeave;
  const std::unique_ptr<transport::Transport> last =
      std::move(transport);  // destroyed before the request
  try {
    last->post(request);
    const auto deadline = std::chrono::steady_clock::now() + kLeaveTimeout;
    while (!request.finished() && std::chrono::steady_clock::now() < deadline) {
      last->progress(deadline - std::chrono::steady_clock::now());
    }
  } catch (const Error& error) {
    log::debug("cannot take leave of the box at " + box + ": " + error.what());
  }
}

}  // namespace hbm::box::client
