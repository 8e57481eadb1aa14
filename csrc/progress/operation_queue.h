// Runs a group's operations: in the order of issue (collectives), or all at the same time (point to
// point).
//
// A thread that needs an operation drives it. A synchronous caller drives its own operation. Some
// asynchronous operations are begun at issue and finished by the thread that waits for them,
// without a hand-over to another thread. These are self-sufficient operations
// (Operation::self_sufficient) on an idle ordered queue, and all operations of an unordered queue
// (messages). A worker thread of the queue drives everything else. It also checks periodically for
// operations that were begun at issue, and takes over each that is not done after its takeover
// delay. So progress never depends on a call of wait().
//
// A callback runs in the call of when_done() if the operation is done by then, else on a worker.
// One worker at a time leads, which means that it drives operations. It stops leading before it
// runs callbacks, and another worker then leads, so a callback may wait for operations of the same
// queue.
//
// At most one thread drives at a time, the progress thread (driving_). It holds no lock while it
// polls. Any other thread that waits is woken by the progress thread, or checks the queue
// periodically. So abort() and stop() reach every thread.
//
// An error of an operation breaks an ordered queue. Queued operations then fail with an
// Error(kAborted) that quotes the error, and every later enqueue() throws such an error. In an
// unordered queue only the operation itself fails.
//
// Ctrl-C ends a wait of the main thread (base/interruption.h). A synchronous operation is
// cancelled, as by abort(); an asynchronous one continues.
//
// At the end of the process (base/process_end.h) every thread that drives an operation, waits, or
// calls the queue parks, workers included. Only the thread that ends the process may still use the
// queue, and drives the operations that it waits for. No worker starts then, so callbacks run only
// in when_done().
//
// Threads: every member may be called from any thread. mutex_ is the only lock. Hooks, operations,
// prologues, epilogues and callbacks are called without it, except the hook `wake` at the end of
// the process.
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

namespace hbm::progress {

// Returns the text that PyTorch's own backends use for a timeout. Programs search for this text, so
// the errors of an operation's timeout and of the timeout of a wait() end with it.
inline std::string torch_timeout_words(std::chrono::milliseconds timeout) {
  return "; Timed out waiting " + std::to_string(timeout.count()) + "ms for it to complete";
}

using Clock = std::chrono::steady_clock;

enum class Mode {
  kSync,   // the caller waits, and drives the operation if the queue is idle
  kAsync,  // the caller begins it if the queue is idle, and does not wait
};

// The steps around an operation that copy tensors in and out. They run on the progress thread. In
// an unordered queue the prologue runs in enqueue().
struct StagingHooks {
  std::function<void()> prologue;  // just before begin(): gathers strided input
  std::function<void()> epilogue;  // after the poll() that completes the operation
};

// A submitted operation, shared by the queue and the threads that wait for it.
class Request {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Returns the operation's error; null on success. REQUIRES: done().
  std::exception_ptr error() const noexcept { return error_; }

 private:
  friend class OperationQueue;

  // Releases the staging memory and the tensors. Called before the request is done, so that no
  // thread other than the waiter drops the last reference to a tensor afterwards.
  void release();

  // Abandons the operation after an error, then releases. Never frees the tensors if other ranks
  // may still write to them.
  void abandon();

  std::unique_ptr<Operation> owned_;  // null: the caller of run_claimed() owns the operation
  Operation* operation_ = nullptr;    // used by the progress thread alone
  StagingHooks staging_;
  bool begun_ = false;  // written by the progress thread, or before the request is shared
  Clock::time_point driven_since_ = Clock::time_point::max();  // not counting poll_without_clock()
  std::chrono::milliseconds timeout_{};                        // counted from driven_since_
  Clock::time_point submitted_at_;
  bool self_sufficient_ = false;
  // The worker takes the operation over when this time has passed since the issue. Guarded by
  // OperationQueue::mutex_.
  std::chrono::microseconds takeover_delay_;
  std::vector<std::function<void()>> callbacks_;  // guarded by OperationQueue::mutex_
  std::exception_ptr error_;                      // written before done_ is released
  std::atomic<bool> done_{false};  // release in finish() pairs with acquire in done()
};

class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  struct Hooks {
    // Called about four times a second while the progress thread waits for the operation's ranks,
    // and when `changes` changes. Throws to fail the operation, as Peers::check() does.
    std::function<void(const Operation& operation)> watch;
    // Returns the cause of an error, or the error itself. May wait briefly.
    std::function<std::exception_ptr(const Operation& operation, const std::exception_ptr& error)>
        explain;
    // Called with the error of each operation that failed while it was driven, or was interrupted
    // by Ctrl-C. Called before the operation is abandoned, so that another rank finds the report of
    // a failure before it finds the abandoned operation. Not called for queued operations that are
    // cancelled because the queue is broken.
    std::function<void(const std::exception_ptr& error)> failed;
    // Wakes a sleeping progress thread (Operation::sleep).
    std::function<void()> wake;
    // Returns the ranks that an operation waited for, for the error of its timeout.
    std::function<std::string(const std::vector<int>& ranks)> name_ranks;
    // Returns a number that changes when watch() may find something new. The progress thread calls
    // it after each poll without progress, and at least every 10 ms.
    std::function<uint64_t()> changes{};
  };

  enum class Order { kOrdered, kUnordered };

  // `oversubscribed`: true if this machine has more ranks than usable processors; see Backoff.
  static std::shared_ptr<OperationQueue> create(Order order, bool oversubscribed, Hooks hooks);
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // Throws Error(kUnsupported), naming `operation`, in a forked child.
  void require_owner(const char* operation) const;

  // Appends the operation to the queue; never waits. An unordered queue also begins it, so that
  // messages leave in the order of issue, and throws any exception of the prologue or of begin().
  // Throws Error(kAborted) on a broken queue, and Error(kUnsupported) in a forked child.
  std::shared_ptr<Request> enqueue(std::unique_ptr<Operation> operation,
                                   std::chrono::milliseconds timeout, StagingHooks staging);

  // Starts an enqueued operation. In Mode::kSync the request is done on return. An error of the
  // operation is left in the request. In Mode::kSync, Ctrl-C aborts the queue, and its exception is
  // thrown. Throws Error(kExhausted) in Mode::kAsync if the queue needs a worker and no thread can
  // be started.
  void launch(const std::shared_ptr<Request>& request, Mode mode);

  // The fast path of a synchronous operation on an idle queue, without a shared Request and without
  // allocating memory.
  //
  // try_claim() puts the caller in front of all operations that are enqueued later. It returns
  // false if the queue is not idle, or if another thread ends the process. A caller that has
  // claimed the queue must call run_claimed() or unclaim() next. run_claimed() drives the operation
  // to its end and throws the operation's error; the caller keeps the operation. try_claim() throws
  // as enqueue() does; `what` names the operation.
  bool try_claim(const char* what);
  void run_claimed(Operation& operation, std::chrono::milliseconds timeout,
                   StagingHooks staging = {});
  void unclaim();

  // Drives or waits until the request is done. Returns false at `deadline`; the operation
  // continues. Throws Error(kUnsupported) in a forked child, unless the request is done. Throws the
  // exception of Ctrl-C on the main thread.
  bool wait(const std::shared_ptr<Request>& request, Clock::time_point deadline);

  // Polls once, unless another thread drives. Does not wait. Returns true if the request is done.
  bool test(const std::shared_ptr<Request>& request);

  // Calls `callback` once the request is done: in this call, if the request is done now or after a
  // short poll; else on a worker. No other function of the queue runs `callback`, so a caller of
  // another function may hold locks that `callback` takes. When the process ends, waits for the
  // request first. Throws Error(kUnsupported) in a forked child, unless the request is done;
  // Error(kExhausted) as launch().
  void when_done(const std::shared_ptr<Request>& request, std::function<void()> callback);

  // Fails everything pending with Error(kAborted, reason), and breaks the queue.
  void abort(const std::string& reason);

  // Calls abort(), then waits for the workers to end. Idempotent. REQUIRES: called before the last
  // reference is dropped. Does not wait if the process is ending.
  void stop();

  // Returns the error that broke the queue; null if it is not broken.
  std::exception_ptr broken() const;

  bool in_forked_child() const noexcept { return fork_.in_child(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  // Values of takeover delays and of a worker's check period.
  static constexpr std::chrono::microseconds kImmediately{0};
  static constexpr auto kNever = std::chrono::microseconds::max();
  struct RequestOutcome {
    Request* request = nullptr;  // null: no request has ended
    std::exception_ptr error;
    std::exception_ptr interruption;  // for the progress thread, independent of the request
  };

  OperationQueue(Order order, bool oversubscribed, Hooks hooks);
  void drive(Lock& lock, const Request* target, Clock::time_point deadline, bool leading = false);
  RequestOutcome poll_without_clock(Request& request);
  RequestOutcome poll_until(std::span<Request* const> requests, Clock::time_point deadline);
  RequestOutcome watch(std::span<Request* const> requests) const;
  Progress step(Request& request);
  void require_in_time(const Request& request, Clock::time_point now) const;
  void settle(Lock& lock, RequestOutcome& outcome);
  void finish(Lock& lock, const Request* request, std::exception_ptr error);
  void interrupt();
  void throw_if_interrupted(Lock& lock);
  void take_turn(const Lock& held);
  static bool has_parked(const std::atomic<bool>* parked);
  bool progress_thread_parked() const;
  [[noreturn]] static void park_without(Lock& lock);
  [[noreturn]] void leave_claimed(const Operation& operation);
  [[noreturn]] void refuse(const std::string& operation) const;
  void fail_pending(Lock& lock);
  std::vector<Request*> active() const;
  std::shared_ptr<Request> work_waiting(Clock::time_point now) const;
  void wake_worker(const Lock& held, std::chrono::microseconds delay);
  std::chrono::microseconds next_check_period(Clock::time_point now) const;
  void start_worker();
  void work();
  static void end_all();
  bool end(Clock::time_point progress_until, Clock::time_point callbacks_until);
  void run_callbacks(Lock& lock);
  void lead(Lock& lock);
  bool follow(Lock& lock);

  const ForkGuard fork_;
  const Order order_;
  const bool oversubscribed_;
  const Hooks hooks_;

  mutable std::mutex mutex_;
  // Notified when a request is done, driving_ has become false, a worker has ended, or the process
  // ends.
  std::condition_variable changed_;
  std::condition_variable work_;                  // the leading worker has something to do
  std::condition_variable follow_;                // there is no leader, or there are callbacks
  std::deque<std::shared_ptr<Request>> pending_;  // in order of issue
  bool driving_ = false;
  const std::atomic<bool>* progress_thread_ = nullptr;      // parked_here() of the progress thread
  Clock::time_point watch_due_ = Clock::time_point::max();  // used by the progress thread alone
  uint64_t changes_seen_ = 0;                               // used by the progress thread alone
  std::chrono::microseconds check_period_ = kNever;  // of the leading worker, while it is idle
  bool stopping_ = false;
  Clock::time_point last_issue_;
  Clock::time_point last_message_;  // issue of the last message that awaits its peer
  std::exception_ptr broken_;
  std::deque<std::function<void()>> ready_;        // callbacks of done requests
  int workers_ = 0;                                // threads in work(), or about to enter it
  int followers_ = 0;                              // workers that wait to lead
  bool leading_ = false;                           // a worker leads
  bool starting_ = false;                          // a new thread has not entered work() yet
  std::vector<const std::atomic<bool>*> callers_;  // parked_here() of threads in callbacks
  std::atomic<bool> interrupted_{false};  // the progress thread shall check the queue's state
};

}  // namespace hbm::progress
