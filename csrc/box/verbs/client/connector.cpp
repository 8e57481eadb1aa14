#include "box/verbs/client/connector.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "box/protocol/proof.h"
#include "box/transport/transport.h"
#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::client {
namespace {

constexpr int kResolveMs{common::kResolveTimeout.count()};
constexpr uint8_t kRetries = 7;  // the maximum; for rnr_retry_count: infinite

std::unique_ptr<addrinfo, common::DestroyBy<freeaddrinfo>> look_up(const std::string& host,
                                                                   uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw Error(ErrorKind::kUnavailable,
                "RDMA: no address of " + host + ": " + gai_strerror(error));
  }
  return std::unique_ptr<addrinfo, common::DestroyBy<freeaddrinfo>>(found);
}

std::string words(rdma_cm_event_type type, int status) {
  std::string text = rdma_event_str(type);
  if (status < 0) text += std::string(", ") + std::strerror(-status);
  if (status > 0) text += ", reason " + std::to_string(status);
  return text;
}

}  // namespace

Connector::Connector(const std::string& host, uint16_t port, protocol::Deadline deadline)
    : box_(host + ":" + std::to_string(port)),
      deadline_(deadline),
      address_(look_up(host, port)),
      channel_(rdma_create_event_channel()) {
  if (channel_ == nullptr) {
    throw Error(ErrorKind::kUnavailable, common::refused("open the connection manager", errno));
  }
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  first_ = resolve();
  domain_ = common::Domain::open(first_->verbs);
}

Connector::~Connector() = default;

void Connector::failed(const std::string& what) const {
  throw Error(ErrorKind::kNetwork,
              "RDMA: cannot connect to the memory box at " + box_ + ": " + what);
}

std::optional<Connector::ConnectionEvent> Connector::next() {
  for (;;) {
    rdma_cm_event* event = nullptr;
    if (rdma_get_cm_event(channel_.get(), &event) == 0) {
      const rdma_conn_param& with = event->param.conn;
      ConnectionEvent outcome{event->event, event->status, {}, {}, {}};
      outcome.challenge =
          common::decode<common::ChallengeMessage>(with.private_data, with.private_data_len);
      outcome.refusal =
          common::decode<common::RefusalMessage>(with.private_data, with.private_data_len);
      outcome.welcome =
          common::decode<common::WelcomeMessage>(with.private_data, with.private_data_len);
      rdma_ack_cm_event(event);
      return outcome;
    }
    if (errno != EAGAIN) failed(std::strerror(errno));
    if (!protocol::wait_for(channel_->fd, POLLIN, deadline_)) return std::nullopt;
  }
}

common::CmId Connector::resolve() {
  std::string cause = "it did not come in time";
  for (const addrinfo* at = address_.get(); at != nullptr; at = at->ai_next) {
    rdma_cm_id* made = nullptr;
    if (rdma_create_id(channel_.get(), &made, nullptr, RDMA_PS_TCP) != 0) {
      throw Error(ErrorKind::kUnavailable, common::refused("open the connection manager", errno));
    }
    common::CmId id(made);
    if (rdma_resolve_addr(made, nullptr, at->ai_addr, kResolveMs) != 0) {
      cause = std::strerror(errno);
      continue;
    }
    const auto address = next();
    if (!address) continue;
    if (address->type != RDMA_CM_EVENT_ADDR_RESOLVED) {
      cause = words(address->type, address->status);
      continue;
    }
    if (rdma_resolve_route(made, kResolveMs) != 0) {
      cause = std::strerror(errno);
      continue;
    }
    const auto route = next();
    if (!route) continue;
    if (route->type == RDMA_CM_EVENT_ROUTE_RESOLVED) return id;
    cause = words(route->type, route->status);
  }
  throw Error(ErrorKind::kUnavailable,
              "RDMA: no device of this host has a route to " + box_ + ": " + cause);
}

Connector::ConnectionEvent Connector::request(rdma_cm_id* id, const common::CallMessage& call) {
  const auto device_most =
      static_cast<uint8_t>(std::clamp(domain_->limits().max_qp_init_rd_atom, 1, 255));
  rdma_conn_param with{};
  with.private_data = &call;
  with.private_data_len = sizeof(call);
  with.initiator_depth = std::min(static_cast<uint8_t>(common::kReadsInFlight), device_most);
  with.retry_count = kRetries;
  with.rnr_retry_count = kRetries;
  if (rdma_connect(id, &with) != 0) failed(std::strerror(errno));
  const auto outcome = next();
  if (!outcome) failed("it did not answer in time");
  if (outcome->refusal) {
    throw transport::Refused(outcome->refusal->status, cause_of(*outcome->refusal));
  }
  return *outcome;
}

common::ChallengeMessage Connector::ask(ibv_qp_init_attr attributes) {
  const common::CmId id = first_ ? std::move(first_) : resolve();
  common::make_queue_pair(id.get(), *domain_, attributes);
  common::CallMessage call{};
  call.magic = common::CallMessage::kMagic;
  const ConnectionEvent outcome = request(id.get(), call);
  if (!outcome.challenge) {
    failed("it does not answer as a memory box: " + words(outcome.type, outcome.status));
  }
  return *outcome.challenge;
}

common::CmId Connector::connect(const common::CallMessage& call, ibv_qp_init_attr& attributes,
                                const protocol::Proof& expected) {
  common::CmId id = resolve();
  common::make_queue_pair(id.get(), *domain_, attributes);
  const ConnectionEvent outcome = request(id.get(), call);
  if (outcome.type != RDMA_CM_EVENT_ESTABLISHED) {
    failed(words(outcome.type, outcome.status));
  }
  if (!outcome.welcome || !protocol::equal(outcome.welcome->proof, expected)) {
    failed("it does not know the token; another process answers at this address");
  }
  return id;
}

bool Connector::closed() {
  rdma_cm_event* event = nullptr;
  bool closed = false;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    closed = closed || event->event == RDMA_CM_EVENT_DISCONNECTED ||
             event->event == RDMA_CM_EVENT_DEVICE_REMOVAL;
    rdma_ack_cm_event(event);
  }
  return closed;
}

}  // namespace hbm::box::verbs::client
