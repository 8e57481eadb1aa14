// Serves clients over RDMA: a box::server::Listener.
//
// The listener has two threads. The accepting thread answers the connection manager (handshake.h),
// admits queue pairs and closes clients. The receiving thread passes requests to the handler. The
// thread that executed a request sends the reply. One-sided reads and writes do not involve the
// listener.
//
// The listener closes a client if
// - it disconnects, or its queue pairs fail;
// - it violates the protocol;
// - not all its queue pairs connect within kConnectTimeout;
// - it is silent for two leases.
//
// Threads: as Listener.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/protocol/wake_event.h"
#include "box/server/listener/admission.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/handshake.h"
#include "box/verbs/server/challenges.h"
#include "box/verbs/server/library.h"
#include "box/verbs/server/peer.h"

namespace hbm::box::verbs::server {

class VerbsListener final : public box::server::Listener {
 public:
  // Listens, as ServerLibrary::listen. REQUIRES: `handler` outlives the listener.
  VerbsListener(box::server::RequestHandler& handler, const VerbsListenerOptions& options);
  ~VerbsListener() override;

  uint16_t port() const noexcept { return port_; }

  void drain(uint32_t most_ms) override;

 private:
  struct Leaving {  // closed, perhaps with work in flight
    std::shared_ptr<Peer> peer;
    Peer::Clock::time_point until;
  };

  void accept_clients();
  void receive();

  // Only the accepting thread calls the functions below.
  void take_events();
  void answer(common::CmId id, const std::optional<common::CallMessage>& call, uint8_t reads);
  void challenge(rdma_cm_id& id);
  void let_in(common::CmId&& id, const common::CallMessage& call, uint8_t reads);
  std::shared_ptr<Peer> welcome(const common::CallMessage& call, const protocol::Hello& hello);
  void accept(common::CmId&& id, const common::CallMessage& call, const IssuedChallenge& challenge,
              const std::shared_ptr<Peer>& peer, uint8_t reads);
  void leave(std::shared_ptr<Peer> peer);
  void sweep();

  const VerbsListenerOptions options_;
  common::EventChannel channel_;
  common::CmId listener_;
  uint16_t port_ = 0;
  std::shared_ptr<Peer::Context> context_;
  protocol::WakeEvent receiver_wake_event_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> settled_{false};  // true: the listener is closing, and all replies are sent
  box::server::listener::LogLimiter log_;

  // Used only by the accepting thread.
  Challenges challenges_;
  std::unordered_map<rdma_cm_id*, std::shared_ptr<Peer>> queue_pairs_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<Leaving> leaving_;
  uint32_t room_ = 0;  // free entries of the completion queue

  std::thread acceptor_;
  std::thread receiver_;
};

}  // namespace hbm::box::verbs::server
