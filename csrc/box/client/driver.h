// Drives a client's operations over the transport: posts ready ones, lets the transport send and
// receive, and completes answered ones. Copies from and to mapped segments.
//
// The thread that holds the driver drives. A thread that waits for its own operation does if no
// other thread holds it; the reconnector's thread drives the rest, and replaces the transport.
//
// The driver is the only user of the transport. In a forked child issue(), wait() and copy_now()
// throw, so the child leaves the transport to the parent.
//
// Threads: issue(), wait() and copy_now() may be called from any; the members below them say which
// locks they REQUIRE. Lock order: the driver's hold, then the request table's lock.
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

namespace hbm::client {

class Driver {
 public:
  using Hold = std::unique_lock<std::mutex>;

  // `while_waiting`: as ClientOptions.
  Driver(std::function<void()> while_waiting, RequestTable& table);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  bool in_forked_child() const noexcept { return fork_.in_child(); }
  void require_parent() const;  // throws in a forked child

  // Issues them in this order. `waits`: the caller calls wait() next, and so may drive.
  // Throws as RequestTable::issue(), with none issued.
  void issue(std::span<const OperationPointer> operations, bool waits);

  // Waits until `until`, and drives if no other thread does. Returns true once the operation is
  // settled. Throws Error(kInvalid) for one that was not issued, which would never settle.
  bool wait(ClientOperation& operation, Clock::time_point until);

  // Copies in the caller if that can be done now: a mapped segment, the connection up, and no
  // unfinished operation in the way. Returns false if it did nothing. `touch`: the bytes of the
  // segment; `local` has as many.
  bool copy_now(smb::Opcode opcode, const Touch& touch, std::byte* local);

  RegisteredMemory& registered_memory() noexcept { return registered_memory_; }

  // -- For the reconnector

  Hold hold() { return Hold(drive_); }
  Hold try_hold() { return Hold(drive_, std::try_to_lock); }

  // One turn, which lasts until `until` at most. REQUIRES: held.
  void step(Clock::time_point until, bool with_copies);

  // The transport, or null while there is none. REQUIRES: held, or the table locked, or by the
  // reconnector's thread, which alone replaces it.
  transport::Transport* transport() const noexcept { return transport_.get(); }

  // Wakes the thread that drives, if it sleeps. REQUIRES: the table locked.
  void wake() const noexcept;

  // When the client has to ask the box for a sign of life. REQUIRES: the table locked.
  Clock::time_point next_ping() const noexcept { return next_ping_; }

  // The operations that the transport has. REQUIRES: held.
  const Operations& posted() const noexcept { return posted_; }

  // Waits for those that copy, and takes the transport out of use. REQUIRES: held.
  std::unique_ptr<transport::Transport> take_transport();

  // Ends the transport, and fails the transfers whose deadline passed while it had their memory.
  // REQUIRES: held.
  void drop_transport();

  // Uses this transport from now on. REQUIRES: held, the table locked, and no transport in use.
  void replace_transport(std::unique_ptr<transport::Transport> transport, Clock::duration lease);

  // Returns the operations that the last transport had, and forgets them. REQUIRES: held.
  Operations take_posted() noexcept { return std::exchange(posted_, {}); }

  // Posts them. REQUIRES: held.
  void post_again(const Operations& operations);

  // Fails all that is unfinished. REQUIRES: held, the table locked, and no transport in use.
  void fail_all(BoxError::Cause cause, const std::string& why);

 private:
  void post(const Operations& operations);
  void take_answers();
  void ping_if_due(Clock::time_point now);
  void copy_some();
  bool copy(RequestTable::Lock& lock, smb::Opcode opcode, const Touch& touch, std::byte* local);
  void leave_to_reconnector();

  const std::function<void()> while_waiting_;
  RequestTable& table_;
  const ForkGuard fork_;
  RegisteredMemory registered_memory_;

  std::mutex drive_;   // the hold
  Operations posted_;  // guarded by drive_; in the order of posting

  // Changed with drive_ held and the table locked; used with either.
  std::unique_ptr<transport::Transport> transport_;

  // Guarded by the table's lock:
  Clock::duration lease_{};
  OperationPointer ping_;  // the last one
  Clock::time_point pinged_{};
  Clock::time_point next_ping_{};
  unsigned copiers_ = 0;  // threads that copy from or to mapped segments
  std::condition_variable no_copiers_;
};

}  // namespace hbm::client
