// The way in over RDMA: a box::Listener.
//
// Two threads: the greeter answers the connection manager (handshake.h), lets queue pairs in and
// sends clients away; the receiver hands requests to the handler. The thread that answers sends the
// reply. Reads and writes do not pass here at all.
//
// A client goes when it disconnects, when its queue pairs fail, when it breaks the protocol, when
// not all its lanes come within 5 s, and when it was silent for two leases.
//
// Threads: as Listener says.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "box/server/listener/log_limiter.h"
#include "box/server/request_handler.h"
#include "box/transport/doorbell.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/handshake.h"
#include "box/verbs/common/library.h"
#include "box/verbs/server/challenges.h"
#include "box/verbs/server/peer.h"

namespace hbm::verbs {

class VerbsListener final : public box::Listener {
 public:
  // As Library::listen. REQUIRES: `handler` outlives the door.
  VerbsListener(box::RequestHandler& handler, const VerbsListenerOptions& options);
  ~VerbsListener() override;

  uint16_t port() const noexcept { return port_; }

  void drain(uint32_t most_ms) override;

 private:
  struct Leaving {  // closed, and perhaps not quiet yet
    std::shared_ptr<Peer> peer;
    Peer::Clock::time_point until;
  };

  void greet();
  void receive();

  // All below are the greeter's.
  void take_events();
  void answer(CmId id, const std::optional<CallMessage>& call, uint8_t reads);
  void challenge(rdma_cm_id& id);
  void let_in(CmId&& id, const CallMessage& call, uint8_t reads);
  std::shared_ptr<Peer> welcome(const CallMessage& call);
  void accept(CmId&& id, const CallMessage& call, const IssuedChallenge& ticket,
              const std::shared_ptr<Peer>& peer, uint8_t reads);
  void leave(std::shared_ptr<Peer> peer);
  void sweep();

  const VerbsListenerOptions options_;
  EventChannel channel_;
  CmId listener_;
  uint16_t port_ = 0;
  std::shared_ptr<Peer::Context> context_;
  transport::Doorbell receiver_bell_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> settled_{false};  // while closing
  box::LogLimiter log_;

  // The greeter's.
  Challenges challenges_;
  std::unordered_map<rdma_cm_id*, std::shared_ptr<Peer>> lanes_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<Leaving> leaving_;
  uint32_t room_ = 0;  // in the completion queue

  std::thread greeter_;
  std::thread receiver_;
};

}  // namespace hbm::verbs
