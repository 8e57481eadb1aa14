// One client of a verbs listener: its queue pairs, its requests and replies, and its memory
// windows.
//
// A request comes as one message on any lane; the reply goes by lane 0. An attachment's windows are
// bound, one on each lane, before its reply is sent, one attachment at a time.
//
// Threads: add(), ready(), close() and destroy() are the accepting thread's; completed() and
// arrived() the receiving thread's; pump() and the answers to requests come by any thread.
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

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"
#include "box/protocol/wake_event.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/domain.h"
#include "box/verbs/common/tuning.h"
#include "box/verbs/server/box_memory.h"
#include "box/verbs/server/shared_queues.h"

namespace hbm::verbs {

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  using Clock = std::chrono::steady_clock;

  // The most completions of a client with `lanes` lanes: replies on lane 0, and the binding of one
  // window on each lane.
  static uint32_t completions(uint32_t lanes) noexcept { return kRepliesInFlight + lanes; }

  // The state that the peers of a listener share, and keep alive. The handler may be gone once the
  // peer is closed.
  struct Context {
    SharedQueues queues;
    BoxMemory memory;
    box::RequestHandler& handler;
    smb::WakeEvent doomed;  // signalled when a peer is doomed
    std::atomic<bool> closing{false};
  };

  // The session has been joined; close() leaves it. With `keys`, every message on lane 0 ends with
  // its tag (box/protocol/seal.h), in both directions.
  Peer(std::shared_ptr<Context> context, std::shared_ptr<box::Session> session, uint32_t lanes,
       const std::optional<smb::SealKeys>& keys);

  // Takes a lane in, whose queue pair exists, before it is accepted. REQUIRES: in order, from 0.
  void add(CmId id, uint32_t inline_bytes);
  // A lane is connected.
  void ready(ibv_qp* queue_pair);

  uint32_t lane_count() const noexcept { return lane_count_; }
  bool closed() const;
  bool complete() const;  // all lanes are connected
  bool settled() const;   // no request is unanswered, and no reply unsent
  bool doomed() const noexcept { return doomed_.load(std::memory_order_relaxed); }
  Clock::time_point made() const noexcept { return made_; }
  Clock::time_point seen() const noexcept { return seen_.load(std::memory_order_relaxed); }

  void arrived(std::span<const std::byte> message);
  void completed(const ibv_wc& completion);
  void pump();  // sends what can be sent

  // The lanes are disconnected, and the session is left. Windows end; what is in flight fails.
  void close();
  bool quiet() const;  // nothing is in flight
  void destroy();      // the queue pairs. REQUIRES: closed

 private:
  struct UnsentReply {
    std::vector<std::byte> bytes;
    size_t sent = 0;
  };
  struct Binding {  // of the windows of an attachment
    uint32_t handle = 0;
    std::shared_ptr<box::BoxSegment> segment;
    bool may_write = false;
    uint64_t id = 0;  // of the request
    smb::Opcode opcode{};
    box::Reply reply;
    std::vector<MemoryWindow> windows;
    size_t left = 0;  // windows whose completion has not come
  };

  void doom(const std::string& cause);
  void answer(uint64_t id, smb::Opcode opcode, uint32_t handle, box::Reply reply);
  // All below: with the lock.
  void queue(uint64_t id, smb::Opcode opcode, const box::Reply& reply);
  void grant(uint64_t id, smb::Opcode opcode, uint32_t handle, box::Reply reply);
  void bind_next();
  void bound();
  void seal(std::vector<std::byte>& reply);
  void send();
  bool send_part(UnsentReply& reply);

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<box::Session> session_;
  const uint32_t lane_count_;
  std::optional<smb::Seal> of_requests_;  // the receiving thread's
  const Clock::time_point made_ = Clock::now();
  std::atomic<Clock::time_point> seen_{made_};
  std::atomic<bool> doomed_{false};

  mutable std::mutex mutex_;  // guards all below; that of the queues is locked under it
  std::vector<CmId> lanes_;
  std::optional<smb::Seal> of_replies_;
  uint32_t connected_ = 0;
  uint32_t inline_bytes_ = 0;
  bool closed_ = false;
  uint32_t unanswered_ = 0;
  uint32_t in_flight_ = 0;  // replies and windows whose completion has not come
  uint32_t replies_in_flight_ = 0;
  std::deque<UnsentReply> unsent_;
  std::deque<Binding> bindings_;                                     // the first one is under way
  std::unordered_map<uint32_t, std::vector<MemoryWindow>> windows_;  // by handle
  std::vector<uint32_t> slots_;                                      // of long replies in flight
};

}  // namespace hbm::verbs
