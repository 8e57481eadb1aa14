// Runs a group's operations: in the order of issue (collectives), or all at once (point to point).
//
// Whoever needs an operation carries it. A synchronous caller drives its own; a small asynchronous
// operation on an idle queue is begun at issue and finished by whoever waits for it, with no thread
// hand-over, and so is a message (an operation of an unordered queue) of any size; everything else
// is driven by the queue's worker thread. A worker that has seen such operations stays half awake
// and adopts one that nobody has waited for within its patience, so progress never depends on the
// user calling wait().
//
// Callbacks run on workers. The worker that leads (drives) stops doing so before it runs any, and
// another takes over, so a callback may wait for operations of the same queue.
//
// At most one thread drives at a time (driving_), and it holds no lock while it polls. Every wait
// polls or ends by notification from the driver, so abort() and stop() always get through.
//
// An error in an ordered queue breaks it: what is queued behind fails with it, and so does every
// later enqueue(). In an unordered queue only the operation itself fails.
//
// Ctrl-C ends a wait of the main thread (base/interruption.h). A synchronous operation is given up,
// as by abort(); an asynchronous one goes on.
//
// At the end of the process (base/process_end.h) every thread that drives, waits or calls parks, a
// worker too. The thread that ends the process may go on using the queue: it drives what it waits
// for. No worker starts any more, so no callback runs except in when_done().
//
// Threads: every member may be called from any thread. Lock order: mutex_ only; hooks, operations,
// prologues, epilogues and callbacks are called without it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "progress/operation.h"

namespace hbm {

// Returns the words of PyTorch's own backends for a timeout. Programs look for them, so the message
// of every operation that times out ends with them.
inline std::string torch_timeout_words(std::chrono::milliseconds timeout) {
  return "; Timed out waiting " + std::to_string(timeout.count()) + "ms for it to complete";
}

using Clock = std::chrono::steady_clock;

enum class Mode {
  kSync,   // the caller waits: drive it here if the queue is idle
  kAsync,  // begin it here if it can wait for a waiter, else hand it to the worker
};

// The steps around an operation, on the thread that drives it.
struct Frame {
  std::function<void()> prologue;  // just before begin(): gathers strided input
  std::function<void()> epilogue;  // after the last poll(), before anyone sees it done
};

// One submitted operation, shared by the queue and whoever waits for it.
class Ticket {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Null on success. REQUIRES: done().
  std::exception_ptr error() const noexcept { return error_; }

 private:
  friend class OperationQueue;

  // Gives back the staging memory and the tensors, before anyone may see the ticket done: whoever
  // waited can then be sure that no other thread drops the last reference to a tensor.
  void let_go();

  // Tells the operation of an error, then lets go. Never frees the tensors if other ranks may still
  // write to them.
  void abandon();

  std::unique_ptr<Operation> owned_;  // null: the operation is somebody else's (run_claimed)
  Operation* operation_ = nullptr;    // used by the driver alone
  Frame frame_;
  bool begun_ = false;  // written by the driver, or before the ticket is shared
  Clock::time_point driven_since_ = Clock::time_point::max();  // but for run_claimed's first looks
  std::chrono::milliseconds timeout_{};                        // counted from then
  Clock::time_point submitted_at_;
  bool small_ = false;
  // Guarded by OperationQueue::mutex_: how long after its issue the worker adopts it.
  std::chrono::microseconds patience_;
  std::vector<std::function<void()>> callbacks_;  // guarded by OperationQueue::mutex_
  std::exception_ptr error_;                      // written before done_ is released
  std::atomic<bool> done_{false};  // release in finish() pairs with acquire in done()
};

class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  struct Hooks {
    // Called about four times a second while a driver waits for the operation's ranks; throws to
    // fail it, as Peers::check() does.
    std::function<void(const Operation& operation)> watch;
    // Turns an error into the one that it is the consequence of; may take a moment.
    std::function<std::exception_ptr(const Operation& operation, const std::exception_ptr& error)>
        explain;
    // Called with each error that an operation ended in.
    std::function<void(const std::exception_ptr& error)> failed;
    // Wakes a driver that sleeps (Operation::sleep).
    std::function<void()> wake;
    // Names the ranks that an operation waited for, for the message of its timeout.
    std::function<std::string(const std::vector<int>& ranks)> name_ranks;
  };

  enum class Order { kOrdered, kUnordered };

  // `crowded`: more ranks than cores here, see Backoff.
  static std::shared_ptr<OperationQueue> create(Order order, bool crowded, Hooks hooks);
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // Throws Error(kUnsupported), naming `operation`, in a forked child.
  void require_owner(const char* operation) const;

  // Gives the operation its place; never waits. An unordered queue also begins it, so that messages
  // leave in the order of issue. Throws Error(kAborted) on a broken queue, Error(kUnsupported) in a
  // forked child, and what begin() throws.
  std::shared_ptr<Ticket> enqueue(std::unique_ptr<Operation> operation,
                                  std::chrono::milliseconds timeout, Frame frame);

  // Sets it going. In Mode::kSync the ticket is done on return. An error of the operation is left
  // in the ticket.
  void launch(const std::shared_ptr<Ticket>& ticket, Mode mode);

  // The way of a synchronous operation on an idle queue, without a ticket and without allocating
  // memory: try_claim() gives the caller the place in front of all that is enqueued from then on,
  // or is false because the queue is not idle; run_claimed() drives the operation, which stays the
  // caller's, to its end. Whoever has claimed must call run_claimed() or unclaim() next.
  // run_claimed() throws the operation's error. try_claim() throws as enqueue() does; `what` names
  // the operation.
  bool try_claim(const char* what);
  void run_claimed(Operation& operation, std::chrono::milliseconds timeout, Frame frame = {});
  void unclaim();

  // Drives or waits until the ticket is done; false when `deadline` came first (the operation goes
  // on).
  bool wait(const std::shared_ptr<Ticket>& ticket, Clock::time_point deadline);

  // One attempt to move on, without waiting; true when the ticket is done.
  bool test(const std::shared_ptr<Ticket>& ticket);

  // Calls `callback` once the ticket is done: here and at once if it is, else on a worker. No other
  // call ever runs it, so a caller that holds a lock meets no foreign code. When the process ends,
  // waits for the ticket first.
  void when_done(const std::shared_ptr<Ticket>& ticket, std::function<void()> callback);

  // Fails all that is pending with Error(kAborted, reason), and breaks the queue.
  void abort(const std::string& reason);

  // abort(), then waits for the worker to end. Idempotent; must be called before the last reference
  // goes. Does not wait when the process ends.
  void stop();

  // Null while the queue is sound, else the error that broke it.
  std::exception_ptr broken() const;

  bool in_forked_child() const noexcept { return fork_.in_child(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  // Patiences of a worker.
  static constexpr std::chrono::microseconds kAtOnce{0};
  static constexpr auto kNever = std::chrono::microseconds::max();
  struct TicketOutcome {
    Ticket* ticket = nullptr;  // null: no ticket ended
    std::exception_ptr error;
    std::exception_ptr interruption;  // for the thread that drove, whatever became of the ticket
  };

  OperationQueue(Order order, bool crowded, Hooks hooks);
  void drive(Lock& lock, const Ticket* target, Clock::time_point deadline, bool leading = false);
  TicketOutcome look_first(Ticket& ticket);
  TicketOutcome poll_until(std::span<Ticket* const> tickets, Clock::time_point deadline);
  TicketOutcome watch(std::span<Ticket* const> tickets) const;
  Progress step(Ticket& ticket);
  void require_in_time(const Ticket& ticket, Clock::time_point now) const;
  void settle(Lock& lock, TicketOutcome& outcome);
  void finish(Lock& lock, const Ticket* ticket, std::exception_ptr error);
  void interrupt();
  void throw_if_interrupted(Lock& lock);
  void take_turn(const Lock& held);
  static bool has_parked(const std::atomic<bool>* parked);
  bool driver_parked() const;
  [[noreturn]] static void park_without(Lock& lock);
  [[noreturn]] void leave_claimed(const Operation& operation);
  [[noreturn]] void refuse(const std::string& operation) const;
  void fail_pending(Lock& lock);
  std::vector<Ticket*> active() const;
  std::shared_ptr<Ticket> work_waiting(Clock::time_point now) const;
  void wake_worker(const Lock& held, std::chrono::microseconds patience);
  std::chrono::microseconds look_again_after(Clock::time_point now) const;
  void start_worker();
  void work();
  static void end_all();
  bool end(Clock::time_point drivers_until, Clock::time_point callbacks_until);
  void run_callbacks(Lock& lock);
  void lead(Lock& lock);
  bool follow(Lock& lock);

  const ForkGuard fork_;
  const Order order_;
  const bool crowded_;
  const Hooks hooks_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;              // a ticket is done, or driving_ was given up
  std::condition_variable work_;                 // the leading worker has something to do
  std::condition_variable follow_;               // there is no leader, or there are callbacks
  std::deque<std::shared_ptr<Ticket>> pending_;  // in order of issue
  bool driving_ = false;
  const std::atomic<bool>* driver_ = nullptr;  // the driver's parked_here(), if there is one
  Clock::time_point watch_due_ = Clock::time_point::max();  // the driver's alone
  std::chrono::microseconds looks_every_ = kNever;          // the leading worker, when it is idle
  bool stopping_ = false;
  Clock::time_point last_issue_;
  Clock::time_point last_message_;  // issued with the shortest patience
  std::exception_ptr broken_;
  std::deque<std::function<void()>> ready_;        // callbacks of tickets that are done
  int workers_ = 0;                                // threads in work()
  int followers_ = 0;                              // of these: waiting for a chance to lead
  bool leading_ = false;                           // one of them leads
  bool starting_ = false;                          // one of them has not come to work() yet
  std::vector<const std::atomic<bool>*> callers_;  // parked_here() of those that run callbacks
  std::atomic<bool> interrupted_{false};  // the driver shall look at the queue's state again
};

}  // namespace hbm
