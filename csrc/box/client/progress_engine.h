// Progresses a client's operations: posts ready ones, sends and receives over the transport, and
// completes the answered ones. Copies from and to mapped segments.
//
// The thread that holds the engine is the progress thread. A thread that waits for its own
// operation becomes the progress thread if there is none. While no thread waits, the reconnector's
// thread is the progress thread. The reconnector also replaces the transport.
//
// The engine is the only user of the transport. In a forked child issue(), wait() and copy_now()
// throw, so the child leaves the transport to the parent.
//
// Threads: any may call issue(), wait() and copy_now(); the other members state the locks that they
// REQUIRE. Lock order: the hold on the engine, then the lock of the request table.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/fork.h"
#include "box/client/error.h"
#include "box/client/operation.h"
#include "box/client/registered_memory.h"
#include "box/client/request_table.h"
#include "box/transport/transport.h"

namespace hbm::box::client {

class ProgressEngine {
 public:
  using Hold = std::unique_lock<std::mutex>;

  // `while_waiting`: as in ClientOptions.
  ProgressEngine(std::function<void()> while_waiting, RequestTable& table);
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  bool in_forked_child() const noexcept { return fork_.in_child(); }
  void require_parent() const;  // throws in a forked child

  // Issues the operations in this order. `waits`: the caller calls wait() next, and can be the
  // progress thread then. Throws the errors of RequestTable::issue(); then none is issued.
  void issue(std::span<const OperationPointer> operations, bool waits);

  // Waits until the operation is settled, `until` at the latest. While it waits, the caller is the
  // progress thread if there is no other. Returns true if the operation is settled. Throws
  // Error(kInvalid) for an operation that was not issued.
  bool wait(ClientOperation& operation, Clock::time_point until);

  // Copies now, in the calling thread, if the segment is mapped, the connection is up, and no
  // unfinished operation conflicts. Returns false if it copied nothing. `touch`: the bytes of the
  // segment; `local` has the same length.
  bool copy_now(protocol::Opcode opcode, const Touch& touch, std::byte* local);

  RegisteredMemory& registered_memory() noexcept { return registered_memory_; }

  // -- For the reconnector

  Hold hold() { return Hold(hold_); }
  Hold try_hold() { return Hold(hold_, std::try_to_lock); }

  // Makes one turn: pings the box if a ping is due, posts ready operations, sends and receives, and
  // completes the answered operations. Sleeps until `until` at most. `with_copies`: if true, also
  // makes queued copies from and to mapped segments. REQUIRES: the engine is held.
  void step(Clock::time_point until, bool with_copies);

  // Returns the transport, or null if there is none. REQUIRES: the engine is held, or the table is
  // locked, or the caller is the reconnector's thread, the only thread that replaces the transport.
  transport::Transport* transport() const noexcept { return transport_.get(); }

  // Wakes the progress thread if it sleeps. REQUIRES: the table is locked.
  void wake() const noexcept;

  // Returns the time of the next ping. REQUIRES: the table is locked.
  Clock::time_point next_ping() const noexcept { return next_ping_; }

  // Returns the operations posted on the transport. REQUIRES: the engine is held.
  const Operations& posted() const noexcept { return posted_; }

  // Waits until no thread copies from or to mapped segments. Then removes the transport and returns
  // it. REQUIRES: the engine is held.
  std::unique_ptr<transport::Transport> take_transport();

  // Destroys the transport, and fails transfers whose deadline passed while it used their memory.
  // REQUIRES: the engine is held.
  void drop_transport();

  // Sets the transport. REQUIRES: the engine is held, the table is locked, and there is no
  // transport.
  void replace_transport(std::unique_ptr<transport::Transport> transport, Clock::duration lease);

  // Returns the operations posted on the last transport, and clears the list. REQUIRES: the engine
  // is held.
  Operations take_posted() noexcept { return std::exchange(posted_, {}); }

  // Posts the operations. REQUIRES: the engine is held.
  void post_again(const Operations& operations);

  // Fails all unfinished operations. REQUIRES: the engine is held, the table is locked, and there
  // is no transport.
  void fail_all(BoxError::Cause cause, const std::string& why);

 private:
  void post(const Operations& operations);
  void take_answers();
  void ping_if_due(Clock::time_point now);
  void copy_some();
  bool copy(RequestTable::Lock& lock, protocol::Opcode opcode, const Touch& touch,
            std::byte* local);
  void leave_to_reconnector();

  const std::function<void()> while_waiting_;
  RequestTable& table_;
  const ForkGuard fork_;
  RegisteredMemory registered_memory_;

  std::mutex hold_;    // the hold on the engine
  Operations posted_;  // guarded by hold_; in the order of posting

  // Changed only while hold_ and the table's lock are held; read while one of them is held.
  std::unique_ptr<transport::Transport> transport_;

  // Guarded by the table's lock:
  Clock::duration lease_{};
  OperationPointer ping_;  // the last one
  Clock::time_point pinged_{};
  Clock::time_point next_ping_{};
  unsigned copiers_ = 0;  // threads that copy from or to mapped segments
  std::condition_variable no_copiers_;
};

}  // namespace hbm::box::client
