// The queues that all clients of a verbs listener share: one ring of receive buffers, one
// completion queue, and a few buffers for long replies. So the memory for messages does not grow
// with the clients.
//
// Threads: every member may be called from any thread, but for wait(), which is the receiving
// thread's.
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

namespace hbm::verbs {

class Peer;

class SharedQueues {
 public:
  // `messages`: receive buffers; `completions`: for all else that is in flight.
  // Throws as BufferPool, and Error(kUnavailable).
  SharedQueues(std::shared_ptr<Domain> domain, uint32_t messages, uint32_t completions);

  const std::shared_ptr<Domain>& domain() const noexcept { return domain_; }
  ibv_cq* completions() const noexcept { return completions_.get(); }
  ibv_srq* receives() const noexcept { return receives_.get(); }
  uint32_t room() const noexcept { return room_; }  // in the completion queue, but for messages

  void enter(uint32_t queue_pair, std::shared_ptr<Peer> peer);
  void leave(uint32_t queue_pair);

  // Buffers for long replies. None: `peer` is told by Peer::pump() when one is free.
  std::optional<uint32_t> take_slot(const std::shared_ptr<Peer>& peer);
  void give_slot(uint32_t slot);
  const BufferPool& slots() const noexcept { return replies_; }

  // Sleeps until completions come or `wake_event` is signalled, and hands them to their peers.
  // Throws Error(kUnavailable) when the device fails.
  void wait(smb::WakeEvent& wake_event);

 private:
  bool poll();
  std::shared_ptr<Peer> peer_of(uint32_t queue_pair);
  void receive(std::span<const uint32_t> slots);

  const std::shared_ptr<Domain> domain_;
  uint32_t room_;
  CompletionChannel completion_channel_;
  CompletionQueue completions_;
  SharedReceives receives_;
  BufferPool requests_;
  BufferPool replies_;  // take() and give() under mutex_

  std::mutex mutex_;                                           // guards all below
  std::unordered_map<uint32_t, std::shared_ptr<Peer>> peers_;  // by the queue pair's number
  std::deque<std::weak_ptr<Peer>> waiting_;                    // for a slot
};

}  // namespace hbm::verbs
