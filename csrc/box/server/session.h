// A session of a client: its attachments, its queued requests, and its lease.
//
// A session's requests are executed one at a time, in order of arrival, by the handler thread that
// took the session from the run queue. The session is in the queue, or with a handler, exactly
// while it has requests.
//
// Threads: any, except members reserved for the handler that has the session.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"
#include "box/server/storage/operation_record.h"
#include "box/server/storage/segment.h"

namespace hbm::box::server {

using Clock = std::chrono::steady_clock;

struct QueuedRequest {
  protocol::Opcode opcode{};
  std::vector<std::byte> body;
  Answer answer;
};

struct SessionAttachment {
  std::shared_ptr<storage::BoxSegment> segment;
  bool may_write = false;
};

// Duplicate-request cache: replays the saved reply to a retransmitted sequenced request.
//
// Numbers rise by one. A request with the number after the last executed one is new. A request
// whose number was executed gets the saved reply, until the client confirms that it has the reply.
// A client may leave at most protocol::kSequencedInFlight replies unconfirmed, so the cache is
// bounded.
//
// Threads: applied() may be called from any thread, the rest by the handler that has the session.
class DuplicateRequestCache {
 public:
  // Requests up to record.applied were executed before the restart of the box.
  explicit DuplicateRequestCache(const storage::SessionRecord& record)
      : record_(record), restored_(record.applied) {}

  enum class Kind {
    kNew,            // execute it, then save()
    kSaved,          // saved() is the reply
    kBeforeRestart,  // executed before the restart: only the record has the outcome
  };
  // Classifies a request, and drops the replies that `sequence` confirms. Throws
  // Refusal(kMalformed) for a number out of order.
  Kind classify(const protocol::Sequence& sequence);

  const Reply& saved(uint64_t number) const;

  // Saves the reply to the last number, applied(), without the segment that it grants, so that the
  // cache keeps no memory alive.
  void save(Reply reply);

  uint64_t applied() const noexcept { return record_.applied.load(std::memory_order_acquire); }
  // Returns the last number that was executed before the restart of the box, or 0 if there is none.
  uint64_t restored() const noexcept { return restored_; }

 private:
  const storage::SessionRecord& record_;
  const uint64_t restored_;
  uint64_t answered_ = 0;
  std::deque<Reply> replies_;  // of the last numbers, up to applied()
};

class Session {
 public:
  struct Identity {
    protocol::Id id;
    bool read_only = false;  // may only attach and read
    // The box has restarted since the session began: kAttach restores the attachments.
    bool restored = false;
    uint32_t pid = 0;
    protocol::TransportKind transport{};
  };

  // `counted`: the box counts the client until the last copy of this pointer is destroyed.
  Session(const Identity& identity, storage::SessionRecord& record,
          std::shared_ptr<const void> counted);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Identity& identity() const noexcept { return identity_; }

  // Restarts the lease.
  void renew() noexcept { seen_.store(Clock::now(), std::memory_order_relaxed); }
  Clock::time_point seen() const noexcept { return seen_.load(std::memory_order_relaxed); }

  // Queues a request, and returns true if the caller must put the session into the run queue. No
  // request follows kLeave.
  //
  // Throws Refusal(kExpired) after kLeave, Refusal(kExhausted) at kMostRequestsPerSession;
  // `request` is unchanged then.
  bool push(QueuedRequest&& request);
  QueuedRequest pop();  // REQUIRES: called by the handler; a request is queued
  bool idle();          // called after a request; false: put the session into the run queue

  // Returns the attachment of the handle, or an empty one.
  SessionAttachment attachment(uint32_t handle) const;
  // Throws Refusal(kExhausted) at kMostAttachmentsPerSession. REQUIRES: called by the handler that
  // has the session; the handle is unused.
  void attach(uint32_t handle, SessionAttachment attachment);
  SessionAttachment detach(uint32_t handle);
  std::vector<SessionAttachment> detach_all();
  size_t attachments() const;
  std::set<protocol::Id> keys() const;  // of all attachments

  // Returns true once kLeave is queued.
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }

  protocol::ClientStats statistics(Clock::time_point now) const;

  // The host of the newest connection whose host is known; empty: of none.
  std::string host() const;
  void set_host(const std::string& host);

  // Only the handler that has the session uses `record` and `request_cache`, except that any thread
  // may read record.applied and call request_cache.applied(). Any thread may use `counters` and
  // `connections`.
  storage::SessionRecord& record;
  DuplicateRequestCache request_cache;
  storage::Counters counters;
  std::atomic<uint32_t> connections{0};

 private:
  const Identity identity_;
  const std::shared_ptr<const void> counted_;
  std::atomic<Clock::time_point> seen_;
  std::atomic<bool> ended_{false};

  mutable std::mutex mutex_;  // guards all below; no other lock is taken under it
  std::unordered_map<uint32_t, SessionAttachment> attachments_;
  std::deque<QueuedRequest> requests_;
  std::string host_;
  bool scheduled_ = false;  // in the run queue, or with a handler
};

}  // namespace hbm::box::server
