// The queues that all clients of a verbs listener share: receive buffers, one completion queue, and
// a few buffers for long replies. So the memory for messages does not grow with the clients.
//
// Threads: any; wait() only by the receiving thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "box/protocol/wake_event.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/domain.h"

namespace hbm::box::verbs::server {

class Peer;

class SharedQueues {
 public:
  // `messages`: number of receive buffers. `completions`: room for the completions of all other
  // work requests. Throws the errors of BufferPool, and Error(kUnavailable).
  SharedQueues(std::shared_ptr<common::Domain> domain, uint32_t messages, uint32_t completions);

  const std::shared_ptr<common::Domain>& domain() const noexcept { return domain_; }
  ibv_cq* completions() const noexcept { return completions_.get(); }
  ibv_srq* receives() const noexcept { return receives_.get(); }
  uint32_t room() const noexcept {
    return room_;
  }  // room for completions, except of received messages

  void enter(uint32_t queue_pair, std::shared_ptr<Peer> peer);
  void leave(uint32_t queue_pair);

  // Takes a buffer for a long reply. If all buffers are in use, returns none; when a buffer is
  // free, Peer::pump() of `peer` is called.
  std::optional<uint32_t> take_buffer(const std::shared_ptr<Peer>& peer);
  void give_buffer(uint32_t buffer);
  const common::BufferPool& reply_buffers() const noexcept { return replies_; }

  // Sleeps until there are completions or `wake_event` is signalled, and passes completions to
  // their peers. Throws Error(kUnavailable) if the device fails.
  void wait(protocol::WakeEvent& wake_event);

 private:
  bool poll();
  std::shared_ptr<Peer> peer_of(uint32_t queue_pair);
  void receive(std::span<const uint32_t> buffers);

  const std::shared_ptr<common::Domain> domain_;
  uint32_t room_;
  common::CompletionChannel completion_channel_;
  common::CompletionQueue completions_;
  common::SharedReceives receives_;
  common::BufferPool requests_;
  common::BufferPool replies_;  // take() and give() under mutex_

  std::mutex mutex_;                                           // guards all below
  std::unordered_map<uint32_t, std::shared_ptr<Peer>> peers_;  // by queue pair number
  std::deque<std::weak_ptr<Peer>> waiting_;                    // for a reply buffer
};

}  // namespace hbm::box::verbs::server
