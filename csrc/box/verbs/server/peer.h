// One client of a verbs listener: queue pairs, requests, replies, and memory windows.
//
// A request is one message on any queue pair; the reply is sent on the first queue pair. Before the
// reply to a kAlloc or kAttach is sent, a window of the segment is bound on each queue pair.
// Attachments are bound one after another.
//
// Threads (verbs_listener.h): the accepting thread calls add(), ready(), close() and destroy(). The
// receiving thread calls completed() and arrived(). Any thread may call pump() and the Answers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"
#include "box/protocol/wake_event.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/tuning.h"
#include "box/verbs/server/box_memory.h"
#include "box/verbs/server/shared_queues.h"

namespace hbm::box::verbs::server {

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns the most completions that a client can have in the completion queue at a time. The
  // first queue pair has completions of replies, and each queue pair has one completion of a bound
  // window.
  static uint32_t completions(uint32_t queue_pairs) noexcept {
    return common::kRepliesInFlight + queue_pairs;
  }

  // The state that all peers of a listener share and keep alive. The handler may be gone once all
  // peers are closed; a closed peer does not use it.
  struct Context {
    SharedQueues queues;
    BoxMemory memory;
    box::server::RequestHandler& handler;
    protocol::WakeEvent doomed;  // signalled when a peer must be closed
    std::atomic<bool> closing{false};
  };

  // REQUIRES: the session is joined; close() leaves it. With `keys`, every message on the first
  // queue pair ends with its tag (box/protocol/authenticator.h), in both directions.
  Peer(std::shared_ptr<Context> context, std::shared_ptr<box::server::Session> session,
       uint32_t queue_pairs, const std::optional<protocol::MacKeys>& keys);

  // Adds a queue pair before it is accepted. REQUIRES: queue pairs are added in order, from number
  // 0.
  void add(common::CmId id, uint32_t inline_bytes);
  // Called when a queue pair is connected.
  void ready(ibv_qp* queue_pair);

  uint32_t queue_pair_count() const noexcept { return queue_pair_count_; }
  bool closed() const;
  bool complete() const;  // true: all queue pairs are connected
  bool settled() const;   // true: all requests are answered, and all replies sent
  bool doomed() const noexcept { return doomed_.load(std::memory_order_relaxed); }
  Clock::time_point made() const noexcept { return made_; }
  Clock::time_point seen() const noexcept { return seen_.load(std::memory_order_relaxed); }

  void arrived(std::span<const std::byte> message);
  void completed(const ibv_wc& completion);
  void pump();  // sends as many replies as possible

  // Disconnects the queue pairs and leaves the session. Work in flight fails, and the client can no
  // longer use its windows.
  void close();
  bool quiet() const;  // true: nothing is in flight
  void destroy();      // destroys the queue pairs. REQUIRES: closed()

 private:
  struct UnsentReply {
    std::vector<std::byte> bytes;
    size_t sent = 0;
  };
  struct Binding {  // the windows of one attachment
    uint32_t handle = 0;
    std::shared_ptr<box::server::storage::BoxSegment> segment;
    bool may_write = false;
    uint64_t id = 0;  // of the request
    protocol::Opcode opcode{};
    box::server::Reply reply;
    std::vector<MemoryWindow> windows;
    size_t left = 0;  // windows without a completion
  };

  void doom(const std::string& cause);
  void answer(uint64_t id, protocol::Opcode opcode, uint32_t handle, box::server::Reply reply);
  // The functions below REQUIRE that mutex_ is held.
  void queue(uint64_t id, protocol::Opcode opcode, const box::server::Reply& reply);
  void grant(uint64_t id, protocol::Opcode opcode, uint32_t handle, box::server::Reply reply);
  void bind_next();
  void bound();
  void add_tags(std::vector<std::byte>& reply);
  void send();
  bool send_part(UnsentReply& reply);

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<box::server::Session> session_;
  const uint32_t queue_pair_count_;
  std::optional<protocol::Authenticator> request_authenticator_;  // used by the receiving thread
  const Clock::time_point made_ = Clock::now();
  std::atomic<Clock::time_point> seen_{made_};
  std::atomic<bool> doomed_{false};

  mutable std::mutex mutex_;  // guards all below; the lock of SharedQueues is taken under it
  std::vector<common::CmId> queue_pairs_;
  std::optional<protocol::Authenticator> reply_authenticator_;
  uint32_t connected_ = 0;
  uint32_t inline_bytes_ = 0;
  bool closed_ = false;
  uint32_t unanswered_ = 0;
  uint32_t in_flight_ = 0;  // replies and windows without a completion
  uint32_t replies_in_flight_ = 0;
  std::deque<UnsentReply> unsent_;
  std::deque<Binding> bindings_;                                     // the first one is being bound
  std::unordered_map<uint32_t, std::vector<MemoryWindow>> windows_;  // by handle
  std::vector<uint32_t> buffers_;                                    // of long replies in flight
};

}  // namespace hbm::box::verbs::server
