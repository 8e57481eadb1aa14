// The client's side of RDMA connections: finds the device towards a box, and connects queue pairs.
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

namespace hbm::verbs {

class Connector {
 public:
  // The box's address, and the port of its verbs listener. Every wait ends at `deadline`.
  // Throws Error(kUnavailable) when no RDMA device of this host has a route to it.
  Connector(const std::string& host, uint16_t port, smb::Deadline deadline);
  ~Connector();

  // The device that the route leads over.
  const std::shared_ptr<Domain>& domain() const noexcept { return domain_; }

  // Asks the box to let this client in. The queue pair of `attributes` is there for its number
  // alone, which tells this request from all others that are under way.
  // Throws Error(kNetwork) when the box does not answer, transport::Refused when it says no, and
  // Error(kUnavailable) when the device gives no queue pair.
  ChallengeMessage ask(ibv_qp_init_attr attributes);

  // A queue pair, in the state in which requests can be posted. `attributes` become what the device
  // gave, which may be less for inline data. `call` has its proof; the box's has to be
  // `expected`.
  // Throws as ask().
  CmId connect(const CallMessage& call, ibv_qp_init_attr& attributes, const smb::Proof& expected);

  // Readable when one of the queue pairs may have been closed by the box.
  int fd() const noexcept { return channel_->fd; }
  bool closed();  // one of them was

 private:
  struct ConnectionEvent {
    rdma_cm_event_type type{};
    int status = 0;
    std::optional<ChallengeMessage> challenge;
    std::optional<RefusalMessage> refusal;
    std::optional<WelcomeMessage> welcome;
  };

  std::optional<ConnectionEvent> next();  // none: nothing happened until the deadline
  CmId resolve();
  ConnectionEvent request(rdma_cm_id* id, const CallMessage& call);
  [[noreturn]] void failed(const std::string& what) const;

  const std::string box_;
  const smb::Deadline deadline_;
  std::unique_ptr<addrinfo, DestroyBy<freeaddrinfo>> address_;
  EventChannel channel_;
  std::shared_ptr<Domain> domain_;
  CmId first_;  // its route is resolved; ask() uses it
};

}  // namespace hbm::verbs
