// Lets clients in over RDMA: a box::Listener.
//
// Two threads: the accepting one answers the connection manager (handshake.h), lets queue pairs in
// and sends clients away; the receiving one hands requests to the handler. The thread that answers
// sends the reply. Reads and writes do not pass here at all.
//
// A client goes when it disconnects, when its queue pairs fail, when it breaks the protocol, when
// not all its lanes come within 5 s, and when it was silent for two leases.
//
// Threads: as Listener says.
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

namespace hbm::verbs {

class VerbsListener final : public box::Listener {
 public:
  // Listens as ServerLibrary::listen says. REQUIRES: `handler` outlives the listener.
  VerbsListener(box::RequestHandler& handler, const VerbsListenerOptions& options);
  ~VerbsListener() override;

  uint16_t port() const noexcept { return port_; }

  void drain(uint32_t most_ms) override;

 private:
  struct Leaving {  // closed, and perhaps not quiet yet
    std::shared_ptr<Peer> peer;
    Peer::Clock::time_point until;
  };

  void accept_clients();
  void receive();

  // All below are the accepting thread's.
  void take_events();
  void answer(CmId id, const std::optional<CallMessage>& call, uint8_t reads);
  void challenge(rdma_cm_id& id);
  void let_in(CmId&& id, const CallMessage& call, uint8_t reads);
  std::shared_ptr<Peer> welcome(const CallMessage& call, const smb::Hello& hello);
  void accept(CmId&& id, const CallMessage& call, const IssuedChallenge& challenge,
              const std::shared_ptr<Peer>& peer, uint8_t reads);
  void leave(std::shared_ptr<Peer> peer);
  void sweep();

  const VerbsListenerOptions options_;
  EventChannel channel_;
  CmId listener_;
  uint16_t port_ = 0;
  std::shared_ptr<Peer::Context> context_;
  smb::WakeEvent receiver_wake_event_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> settled_{false};  // while closing
  box::LogLimiter log_;

  // The accepting thread's.
  Challenges challenges_;
  std::unordered_map<rdma_cm_id*, std::shared_ptr<Peer>> lanes_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<Leaving> leaving_;
  uint32_t room_ = 0;  // in the completion queue

  std::thread acceptor_;
  std::thread receiver_;
};

}  // namespace hbm::verbs
