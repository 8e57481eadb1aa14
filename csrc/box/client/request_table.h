// A client's unfinished operations and its attachments. Decides which operation may be posted or
// copied next, and applies the replies of the box.
//
// The table owns the only lock on the state of the client. The progress engine and the reconnector
// take it with lock(), from any of their threads. Every other member REQUIRES it, except
// new_handle() and wake_event().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "box/client/connection_status.h"
#include "box/client/error.h"
#include "box/client/operation.h"
#include "box/protocol/wake_event.h"

namespace hbm::box::client {

using OperationPointer = std::shared_ptr<ClientOperation>;
using Operations = std::vector<OperationPointer>;

class RequestTable {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // `timeout`: of each operation; 0: none. `box`: the URL of the box, for errors and the log.
  RequestTable(std::chrono::milliseconds timeout, std::string box)
      : timeout_(timeout), status_(std::move(box)) {}
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;

  Lock lock() const { return Lock(mutex_); }

  uint32_t new_handle() noexcept { return next_handle_.fetch_add(1, std::memory_order_relaxed); }

  // Wakes the reconnector's thread, for example when the connection breaks, or when there is work
  // and no progress thread.
  protocol::WakeEvent& wake_event() noexcept { return wake_event_; }

  // -- The connection

  ConnectionStatus& status() noexcept { return status_; }

  // Changes kUp to kBroken; does nothing in other states.
  void break_off(const std::string& why);

  // -- Issue

  // Issues the operations in this order. An operation that fails now, or touches no bytes, settles
  // now. Throws BoxError kClosed after close(), or Error(kInvalid) for a freed segment; then none
  // is issued.
  void issue(std::span<const OperationPointer> operations);

  // Issues an operation without checks. The engine issues its pings this way.
  void add(const OperationPointer& operation, Clock::time_point deadline);

  // -- For the progress engine

  // Returns true if there is work: the connection is up, and an operation is posted or ready.
  bool has_work() const;
  bool can_progress() const noexcept { return status_.up() && !stopping_; }
  size_t posted_count() const noexcept { return in_flight_ + outstanding_.size(); }
  Clock::time_point earliest_deadline() const noexcept { return earliest_; }

  // Returns the operations to post now, with their numbers. Finishes operations that settled while
  // they waited.
  Operations take_ready();

  // Applies the reply to an operation whose request the transport has finished. Then finishes the
  // operation.
  void complete(OperationPointer operation);

  // The ready transfers of mapped segments, in order. take_copy() removes and returns the first
  // one, or null if there is none.
  bool has_copies() const noexcept { return !copies_.empty(); }
  OperationPointer take_copy();
  void put_back_copy(OperationPointer operation) { copies_.push_front(std::move(operation)); }

  // Finishes an operation whose memory is no longer used. Settles it if it is not settled.
  void finish(OperationPointer operation);

  // Fails operations whose deadline has passed. `transport`: true if there is a transport, which
  // may use the memory of posted transfers. If the deadline of such a transfer has passed, breaks
  // the connection off; the transfer fails once the transport is gone.
  void expire(Clock::time_point now, bool transport);
  void fail_expired(ClientOperation& operation) const {
    fail(operation, timeout_failure(operation));
  }

  // -- For the reconnector

  // Returns true if the session can continue at a box that has executed its requests up to
  // `applied`. Returns false if the box forgot answered requests, for example after a crash of its
  // host.
  bool remembered(uint64_t applied) const;

  // Returns the attachments that are not lost.
  std::vector<std::shared_ptr<Attachment>> attachments() const;

  // Marks an attachment as lost after a restart, and fails its operations. `deleted`: true if no
  // segment has the key; then a delete in flight has succeeded.
  void lose(Attachment& attachment, const std::string& why, bool deleted = false);
  void lose_all(const std::string& why);

  // `posted`: the operations on the last transport. Returns those to send again, in order. Finishes
  // the others, or makes them ready to be posted under new numbers.
  Operations repost(Operations posted, bool same_session, bool same_generation);

  // -- The end

  bool closing() const noexcept { return closing_; }
  bool stopping() const noexcept { return stopping_; }

  // Rejects further operations. Waits until no operation is unfinished, the connection is no longer
  // up, or `until` has passed. An exception of `while_waiting` ends the wait and is returned; else
  // returns null.
  std::exception_ptr close(Lock& lock, Clock::time_point until,
                           const std::function<void()>& while_waiting);

  // From now on, no operation progresses, and the client does not reconnect.
  void stop() noexcept { stopping_ = true; }

  // Fails and forgets all unfinished operations. REQUIRES: none of them is on a transport.
  void fail_all(BoxError::Cause cause, const std::string& why);

 private:
  void check(const ClientOperation& operation) const;
  Failure timeout_failure(const ClientOperation& operation) const;
  std::optional<Failure> reason_to_fail(const ClientOperation& operation) const;
  static void fail(ClientOperation& operation, Failure failure);
  void enqueue(const std::vector<ClientOperation*>& ready);
  void number(ClientOperation& operation);
  void attach(const std::shared_ptr<Attachment>& attachment);
  void detach(const Attachment& attachment);

  const std::chrono::milliseconds timeout_;
  std::atomic<uint32_t> next_handle_{1};
  protocol::WakeEvent wake_event_;

  mutable std::mutex mutex_;  // guards all below
  ConnectionStatus status_;

  std::list<OperationPointer> unfinished_;  // in the order of issue
  std::deque<OperationPointer> ready_;      // ready, and neither sequenced nor copies
  std::deque<OperationPointer> sequenced_;  // ready sequenced requests
  std::deque<OperationPointer> copies_;     // ready transfers of mapped segments
  size_t in_flight_ = 0;                    // posted operations without a number
  std::set<uint64_t> outstanding_;          // numbers of posted sequenced requests
  uint64_t next_number_ = 1;
  Clock::time_point earliest_ = Clock::time_point::max();  // earliest deadline

  std::unordered_map<uint32_t, std::shared_ptr<Attachment>> attachments_;  // by handle
  std::map<protocol::Id, std::weak_ptr<std::vector<ClientOperation*>>>
      by_key_;  // for each key, its Attachment::unfinished

  bool closing_ = false;
  bool stopping_ = false;
  std::condition_variable nothing_left_;
};

}  // namespace hbm::box::client
