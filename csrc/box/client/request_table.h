// A client's unfinished operations and its attachments. The table decides which operation may be
// posted or copied next, and applies the replies of the box.
//
// The table owns the client's one lock on its state. The driver and the reconnector take it with
// lock(), which any of their threads may; every other member REQUIRES it, except new_handle() and
// wake_event().
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

namespace hbm::client {

using OperationPointer = std::shared_ptr<ClientOperation>;
using Operations = std::vector<OperationPointer>;

class RequestTable {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // `timeout`: of each operation, 0 for none. `box`: its URL, for messages.
  RequestTable(std::chrono::milliseconds timeout, std::string box)
      : timeout_(timeout), status_(std::move(box)) {}
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;

  Lock lock() const { return Lock(mutex_); }

  uint32_t new_handle() noexcept { return next_handle_.fetch_add(1, std::memory_order_relaxed); }

  // Wakes the reconnector's thread: the connection broke, or work has no driver.
  smb::WakeEvent& wake_event() noexcept { return wake_event_; }

  // -- The connection

  ConnectionStatus& status() noexcept { return status_; }

  // From kUp to kBroken; nothing if it is not up.
  void break_off(const std::string& why);

  // -- Issue

  // Issues them in this order. An operation that fails now, or touches no bytes, settles now.
  // Throws BoxError kClosed, or Error(kInvalid) for a segment that was freed, with none issued.
  void issue(std::span<const OperationPointer> operations);

  // Issues one without the checks; the driver's pings come this way.
  void add(const OperationPointer& operation, Clock::time_point deadline);

  // -- For the driver

  // Returns true if a driver has something to do: the connection is up, and not all is blocked.
  bool has_work() const;
  bool drivable() const noexcept { return status_.up() && !stopping_; }
  size_t posted_count() const noexcept { return in_flight_ + outstanding_.size(); }
  Clock::time_point earliest_deadline() const noexcept { return earliest_; }

  // Returns the operations to post now, with their numbers. Finishes an operation that settled
  // while it waited.
  Operations take_ready();

  // The transport has finished the operation's request: takes the reply, and finishes it.
  void complete(OperationPointer operation);

  // Ready transfers of mapped segments, in order. Null: there is none.
  bool has_copies() const noexcept { return !copies_.empty(); }
  OperationPointer take_copy();
  void put_back_copy(OperationPointer operation) { copies_.push_front(std::move(operation)); }

  // Nothing uses the operation's memory any more. Settles it if nothing else has.
  void finish(OperationPointer operation);

  // Fails operations whose deadline has passed. A posted transfer fails when the transport is gone,
  // which uses its memory until then; `transport`: there is one.
  void expire(Clock::time_point now, bool transport);
  void fail_late(ClientOperation& operation) const { fail(operation, late(operation)); }

  // -- For the reconnector

  // Returns true if the session can continue at a box that has executed its requests up to
  // `applied`. A box that forgot answered requests (its host crashed, say) has lost the session.
  bool remembered(uint64_t applied) const;

  // Returns the attachments that are not lost.
  std::vector<std::shared_ptr<Attachment>> attachments() const;

  // The box came back without the segment: it is lost, and its operations fail. `deleted`: nothing
  // has its key, so a delete that was sent has succeeded.
  void lose(Attachment& attachment, const std::string& why, bool deleted = false);
  void lose_all(const std::string& why);

  // Takes the operations that the last transport had. Returns those to send again, in their order;
  // finishes the others, or makes them ready to be posted under new numbers.
  Operations repost(Operations posted, bool same_session, bool same_contents);

  // -- The end

  bool closing() const noexcept { return closing_; }
  bool stopping() const noexcept { return stopping_; }

  // Issues no more. Waits until nothing is unfinished, the connection is no longer up, or `until`.
  // Returns the exception of `while_waiting`, which ends the wait.
  std::exception_ptr close(Lock& lock, Clock::time_point until,
                           const std::function<void()>& while_waiting);

  // From now on no thread drives or reconnects.
  void stop() noexcept { stopping_ = true; }

  // Fails and forgets all that is unfinished. REQUIRES: no transport has any of it.
  void fail_all(BoxError::Cause cause, const std::string& why);

 private:
  void check(const ClientOperation& operation) const;
  Failure late(const ClientOperation& operation) const;
  std::optional<Failure> reason_to_fail(const ClientOperation& operation) const;
  static void fail(ClientOperation& operation, Failure failure);
  void enqueue(const std::vector<ClientOperation*>& ready);
  void number(ClientOperation& operation);
  void attach(const std::shared_ptr<Attachment>& attachment);
  void detach(const Attachment& attachment);

  const std::chrono::milliseconds timeout_;
  std::atomic<uint32_t> next_handle_{1};
  smb::WakeEvent wake_event_;

  mutable std::mutex mutex_;  // guards all below
  ConnectionStatus status_;

  std::list<OperationPointer> unfinished_;  // in the order of issue
  std::deque<OperationPointer> ready_;      // requests without a number, and transfers
  std::deque<OperationPointer> sequenced_;  // ready too
  std::deque<OperationPointer> copies_;     // ready transfers of mapped segments
  size_t in_flight_ = 0;                    // posted ones without a number
  std::set<uint64_t> outstanding_;          // numbers of the posted ones that have one
  uint64_t next_number_ = 1;
  Clock::time_point earliest_ = Clock::time_point::max();  // deadline

  std::unordered_map<uint32_t, std::shared_ptr<Attachment>> attachments_;  // by handle
  std::map<smb::Id, std::weak_ptr<std::vector<ClientOperation*>>>
      by_key_;  // Attachment::unfinished

  bool closing_ = false;
  bool stopping_ = false;
  std::condition_variable nothing_left_;
};

}  // namespace hbm::client
