// The client's side of RDMA connections: finds the device with a route to a box, and connects queue
// pairs.
//
// Threads: one at a time.
#pragma once

#include <netdb.h>

#include <memory>
#include <optional>
#include <string>

#include "box/protocol/socket.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/handshake.h"

namespace hbm::box::verbs::client {

class Connector {
 public:
  // `host` and `port`: of the verbs listener of the box. All waits end at `deadline`. Throws
  // Error(kUnavailable) if no RDMA device of this host has a route to the box.
  Connector(const std::string& host, uint16_t port, protocol::Deadline deadline);
  ~Connector();

  // Returns the device of the route.
  const std::shared_ptr<common::Domain>& domain() const noexcept { return domain_; }

  // Requests a challenge from the box. Creates a queue pair with `attributes`, only because its
  // number distinguishes concurrent requests.
  //
  // Throws Error(kNetwork) if the box does not reply, transport::Refused if it refuses,
  // Error(kUnavailable) if the device provides no queue pair.
  common::ChallengeMessage ask(ibv_qp_init_attr attributes);

  // Returns a connected queue pair. Sets `attributes` to the granted values, perhaps with less
  // inline data. `expected`: the proof that the box must send. REQUIRES: the proof of `call` is
  // set. Throws the errors of ask().
  common::CmId connect(const common::CallMessage& call, ibv_qp_init_attr& attributes,
                       const protocol::Proof& expected);

  // Returns a descriptor that is readable when the box may have closed a queue pair.
  int fd() const noexcept { return channel_->fd; }
  bool closed();  // true: the box has closed a queue pair

 private:
  struct ConnectionEvent {
    rdma_cm_event_type type{};
    int status = 0;
    std::optional<common::ChallengeMessage> challenge;
    std::optional<common::RefusalMessage> refusal;
    std::optional<common::WelcomeMessage> welcome;
  };

  std::optional<ConnectionEvent> next();  // none: no event before the deadline
  common::CmId resolve();
  ConnectionEvent request(rdma_cm_id* id, const common::CallMessage& call);
  [[noreturn]] void failed(const std::string& what) const;

  const std::string box_;
  const protocol::Deadline deadline_;
  std::unique_ptr<addrinfo, common::DestroyBy<freeaddrinfo>> address_;
  common::EventChannel channel_;
  std::shared_ptr<common::Domain> domain_;
  common::CmId first_;  // id with the resolved route, for ask()
};

}  // namespace hbm::box::verbs::client
