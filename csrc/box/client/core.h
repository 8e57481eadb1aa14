// The engine of a client: its unfinished operations, and the thread that drives them over the
// transport.
//
// The core is the only user of a transport, and the one place that keeps a forked child from it:
// whatever would use it throws there, and ~Client leaves the core to the parent.
//
// The driver is the thread that holds `drive_`: it posts what is ready, lets the transport send and
// receive, and completes what was answered. A thread that waits for its own operation drives if
// nobody else does; the keeper, a thread of the core's own, drives whatever is left, keeps the
// lease and reconnects. An operation is referred to by `unfinished_` until it is finished.
//
// Files by verb: core.cpp issues, waits and closes; drive.cpp drives; keep.cpp keeps the
// lease; reconnect.cpp reconnects.
//
// Threads: the public members may be called from any. Lock order: drive_, mutex_.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "box/client/dialer.h"
#include "box/client/error.h"
#include "box/client/operation.h"
#include "box/client/options.h"
#include "box/client/registered_memory.h"
#include "box/protocol/wake_event.h"
#include "box/transport/transport.h"

namespace hbm::client {

using OperationPointer = std::shared_ptr<ClientOperation>;

class Core {
 public:
  explicit Core(const ClientOptions& options);  // connects, as Client
  ~Core();                                      // REQUIRES: close() was called
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const ClientOptions& options() const noexcept { return options_; }
  const Dialer& dialer() const noexcept { return dialer_; }

  bool in_forked_child() const noexcept { return fork_.in_child(); }
  void require_parent() const;  // throws in a forked child

  uint32_t new_handle() noexcept { return next_handle_.fetch_add(1, std::memory_order_relaxed); }

  // Issues them in this order. `waits`: the caller calls wait() next, and so may drive.
  // Throws BoxError kClosed, or Error(kInvalid) for a segment that was freed, with none issued.
  void issue(std::span<const OperationPointer> operations, bool waits);

  // Waits until then, driving if nobody else does; true once the operation is settled.
  // Throws Error(kInvalid) for one that was not issued: nobody would settle it.
  bool wait(ClientOperation& operation, Clock::time_point until);

  // A transfer that is a copy and can be done at once: does it, in the caller. False: nothing
  // happened. `touch` says what of the segment, `local` has as many bytes.
  bool copy_now(smb::Opcode opcode, const Touch& touch, std::byte* local);

  // The segment itself. Throws what an operation on the attachment would, and
  // Error(kUnsupported) where it is not mapped.
  std::shared_ptr<std::byte> memory(const Attachment& attachment);

  RegisteredMemory& registered_memory() noexcept { return registered_memory_; }

  // Waits up to `patience` for what is unfinished, then closes. An exception of `while_waiting`
  // ends the wait, and is thrown once all is closed.
  void close(std::chrono::milliseconds patience);
  bool closed() const;

 private:
  enum class ConnectionState {
    kUp,
    kBroken,   // the keeper reconnects
    kGivenUp,  // for good
  };
  using Lock = std::unique_lock<std::mutex>;
  using Operations = std::vector<OperationPointer>;

  struct Renewal;  // reconnect.cpp: an attachment made again

  // core.cpp; mutex_ is locked, but for the last two
  void check(const ClientOperation& operation) const;
  void add(const OperationPointer& operation, Clock::time_point deadline);
  std::optional<Failure> reason_to_fail(const ClientOperation& operation) const;
  void enqueue(const std::vector<ClientOperation*>& ready);
  Failure late(const ClientOperation& operation) const;  // it is not done in time
  void fail(ClientOperation& operation, Failure failure);
  void finish(OperationPointer operation);
  void fail_unfinished(BoxError::Cause cause, const std::string& why);  // drive_ too
  void break_off(const std::string& why);
  std::string loss() const;    // of the connection: why
  void warn_of_loss();         // once an outage
  std::string outage() const;  // since when, and why, the box is unreachable
  bool has_work() const;       // for a driver
  std::exception_ptr wait_for_nothing_left(Lock& lock, Clock::time_point until);
  void wake_driver();
  void leave_to_keeper();

  // drive.cpp; drive_ is locked, and mutex_ is not unless they say so
  void step(Clock::time_point until, bool with_copies);
  void send(const Operations& operations);
  void take_answers();
  void copy_some();
  void expire(Clock::time_point now);                                               // mutex_ too
  void ping_if_due(Clock::time_point now);                                          // mutex_ too
  Operations take_ready(Clock::time_point now);                                     // mutex_ too
  void number(ClientOperation& operation);                                          // mutex_ too
  void complete(OperationPointer operation);                                        // mutex_ too
  void admit(const std::shared_ptr<Attachment>& attachment);                        // mutex_ too
  void dismiss(const Attachment& attachment);                                       // mutex_ too
  bool copy(Lock& lock, smb::Opcode opcode, const Touch& touch, std::byte* local);  // mutex_ alone

  // keep.cpp, reconnect.cpp; the keeper's, with drive_ locked but for keep() and sleep()
  void keep();
  bool keep_on();  // one turn; false: it is time to stop
  void sleep(Clock::time_point until);
  bool pause(Clock::duration delay);  // false: it is time to stop
  void reconnect();
  std::unique_ptr<transport::Transport> take_transport();
  void drop_transport();
  bool try_again(std::chrono::milliseconds timeout);
  bool remembers(uint64_t applied) const;
  void attach_again(transport::Transport& transport, uint64_t applied,
                    std::vector<Renewal>& renewals);
  void resume(transport::OpenedTransport& opened, std::vector<Renewal>& renewals,
              bool same_session);
  void lose(Attachment& attachment, const std::string& why);     // mutex_ too
  void settle_deletes(const Attachment& attachment);             // mutex_ too
  Operations unanswered(bool same_session, bool same_contents);  // mutex_ too

  const ClientOptions options_;
  Dialer dialer_;  // used by the keeper alone, once connected
  const ForkGuard fork_;
  std::atomic<uint32_t> next_handle_{1};
  smb::WakeEvent wake_event_;  // the keeper's
  RegisteredMemory registered_memory_;

  std::mutex drive_;
  Operations posted_;  // guarded by drive_; in the order of posting

  mutable std::mutex mutex_;  // guards all below
  // Changed with drive_ and mutex_ both locked; used with either.
  std::unique_ptr<transport::Transport> transport_;
  ConnectionState state_ = ConnectionState::kUp;
  // While it is not up:
  std::string why_;
  std::string last_attempt_;  // to reconnect: how it failed
  std::chrono::system_clock::time_point since_{};
  Clock::time_point broken_at_{};
  bool warned_ = false;  // of this outage: once an operation has to wait for its end
  // An outage goes on while connections break over which nothing was answered that was asked.
  bool answered_ = true;    // over the connection that is up, or was last
  unsigned fruitless_ = 0;  // connections of this outage over which nothing was
  smb::Id session_;
  smb::Id contents_;
  Clock::duration lease_{};

  std::list<OperationPointer> unfinished_;  // in the order of issue
  std::deque<OperationPointer> ready_;      // requests without a number, and transfers
  std::deque<OperationPointer> sequenced_;  // ready too
  std::deque<OperationPointer> copies_;     // ready transfers of mapped segments
  size_t in_flight_ = 0;                    // of posted_: those without a number
  std::set<uint64_t> outstanding_;          // of posted_: the numbers
  uint64_t next_number_ = 1;
  Clock::time_point earliest_ = Clock::time_point::max();                  // deadline
  std::unordered_map<uint32_t, std::shared_ptr<Attachment>> attachments_;  // by handle
  std::map<smb::Id, std::weak_ptr<std::vector<ClientOperation*>>>
      by_key_;  // Attachment::unfinished

  OperationPointer ping_;  // the last one
  Clock::time_point pinged_{};
  Clock::time_point next_ping_{};

  unsigned copiers_ = 0;  // threads that copy from or to mapped segments
  std::condition_variable no_copiers_;
  bool closing_ = false;
  bool stopping_ = false;
  std::condition_variable nothing_left_;
  std::mutex closer_;  // one close() at a time; before all other locks
  std::thread keeper_;
};

}  // namespace hbm::client
