// A client of the box: what it attached, its requests in order, and its lease.
//
// A session's requests are carried out one at a time in the order in which they came, by the
// handler thread that has the session: that took it from the ring. It is in the ring exactly while
// it has requests.
//
// Threads: every member may be called from any thread, but for those that say that they are for the
// handler that has the session.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"
#include "box/server/storage/operation_record.h"
#include "box/server/storage/segment.h"

namespace hbm::box {

using Clock = std::chrono::steady_clock;

struct QueuedRequest {
  smb::Opcode opcode{};
  std::vector<std::byte> body;
  Answer answer;
};

struct SessionAttachment {
  std::shared_ptr<BoxSegment> segment;
  bool may_write = false;
};

// Tells new sequenced requests of a session from repeated ones, and has the replies to those.
//
// Numbers rise by one. The one after the last that was carried out is new; those that were carried
// out, and whose replies the client has not confirmed, are answered again as they were. A client
// may leave smb::kWindow replies unconfirmed, so the window is bounded.
//
// Threads: applied() may be called from any; all else by the handler that has the session.
class ReplyWindow {
 public:
  // The requests up to record.applied were carried out before the box was restarted.
  explicit ReplyWindow(const SessionRecord& record) : record_(record), restored_(record.applied) {}

  enum class Turn {
    kNew,      // carry it out, then save()
    kSaved,    // saved() is the reply
    kForeign,  // carried out before the restart: the record alone knows how it ended
  };
  // Forgets the replies that `sequence` confirms.
  // Throws Refusal(kMalformed) for a number that breaks the rules.
  Turn turn(const smb::Sequence& sequence);

  const Reply& saved(uint64_t number) const;

  // Keeps the reply of the last number, applied(). What it grants is not kept, so that a window
  // holds no memory of a segment.
  void save(Reply reply);

  uint64_t applied() const noexcept { return record_.applied.load(std::memory_order_acquire); }
  // The last number before the box was restarted; 0: it was not.
  uint64_t restored() const noexcept { return restored_; }

 private:
  const SessionRecord& record_;
  const uint64_t restored_;
  uint64_t answered_ = 0;
  std::deque<Reply> replies_;  // of the numbers up to applied()
};

class Session {
 public:
  struct Identity {
    smb::Id id;
    bool read_only = false;  // it may attach and read, and nothing else
    // The box was restarted since the session began: its attachments are made again by kAttach.
    bool restored = false;
    uint32_t pid = 0;
    smb::TransportKind transport{};
  };

  // `counted`, by which the client counts among the box's, goes when nobody holds the session.
  Session(const Identity& identity, SessionRecord& record, std::shared_ptr<const void> counted);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Identity& identity() const noexcept { return identity_; }

  // The lease starts anew.
  void renew() noexcept { seen_.store(Clock::now(), std::memory_order_relaxed); }
  Clock::time_point seen() const noexcept { return seen_.load(std::memory_order_relaxed); }

  // Puts a request behind the others; after kLeave no more are taken. True: the caller puts the
  // session into the ring.
  // Throws Refusal(kExpired) after kLeave, Refusal(kExhausted) at kMostRequestsPerSession;
  // `request` is then as it was.
  bool push(QueuedRequest&& request);
  QueuedRequest pop();  // REQUIRES: by the handler that has it; a request
  bool idle();          // at the end of a request; false: the caller puts the session into the ring

  // No attachment: none has that handle.
  SessionAttachment attachment(uint32_t handle) const;
  // Throws Refusal(kExhausted) at kMostAttachmentsPerSession. REQUIRES: by the handler that has the
  // session; the handle is not in use.
  void attach(uint32_t handle, SessionAttachment attachment);
  SessionAttachment detach(uint32_t handle);
  std::vector<SessionAttachment> detach_all();
  size_t attachments() const;
  std::set<smb::Id> keys() const;  // of what is attached

  bool ended() const noexcept {
    return ended_.load(std::memory_order_acquire);
  }  // kLeave was taken

  smb::ClientStats statistics(Clock::time_point now) const;

  // Used by the handler that has the session, but for `applied` and applied().
  SessionRecord& record;
  ReplyWindow window;
  Counters counters;
  std::atomic<uint32_t> connections{0};

 private:
  const Identity identity_;
  const std::shared_ptr<const void> counted_;
  std::atomic<Clock::time_point> seen_;
  std::atomic<bool> ended_{false};

  mutable std::mutex mutex_;  // guards all below; nothing else is locked under it
  std::unordered_map<uint32_t, SessionAttachment> attachments_;
  std::deque<QueuedRequest> requests_;
  bool scheduled_ = false;  // in the ring, or in a handler's hands
};

}  // namespace hbm::box
