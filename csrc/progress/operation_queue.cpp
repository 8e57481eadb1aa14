#include "progress/operation_queue.h"

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "base/process_end.h"
#include "base/start_thread.h"
#include "base/waiting.h"
#include "progress/backoff.h"
#include "progress/tuning.h"

namespace hbm::progress {
namespace {

thread_local const OperationQueue* worker_of = nullptr;  // the queue whose worker this thread is

struct LiveQueues {
  std::mutex mutex;  // guards `all`; taken alone
  std::vector<std::weak_ptr<OperationQueue>> all;
};

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

Error cancelled(const Operation& operation, const std::exception_ptr& cause) {
  return {ErrorKind::kAborted, operation.describe() + " was cancelled: " + message_of(cause)};
}

}  // namespace

void Request::release() {
  operation_ = nullptr;
  owned_.reset();
  staging_ = {};
}

void Request::abandon() {
  if (begun_) {
    operation_->abandon();
    if (operation_->peers_may_write()) {
      static std::mutex mutex;
      static auto* const kept = new std::vector<StagingHooks>;
      const std::lock_guard lock(mutex);
      kept->push_back(std::move(staging_));
    }
  }
  release();
}

OperationQueue::OperationQueue(Order order, bool oversubscribed, Hooks hooks)
    : order_(order), oversubscribed_(oversubscribed), hooks_(std::move(hooks)) {}

std::shared_ptr<OperationQueue> OperationQueue::create(Order order, bool oversubscribed,
                                                       Hooks hooks) {
  const std::shared_ptr<OperationQueue> queue(
      new OperationQueue(order, oversubscribed, std::move(hooks)));
  LiveQueues& live = per_process<LiveQueues>();
  {
    const std::lock_guard lock(live.mutex);
    std::erase_if(live.all, [](const auto& each) { return each.expired(); });
    live.all.push_back(queue);
  }
  at_process_end(&OperationQueue::end_all);
  return queue;
}

void OperationQueue::require_owner(const char* operation) const {
  if (!fork_.in_child()) return;
  throw Error(ErrorKind::kUnsupported,
              std::string(operation) +
                  " was called in a forked child; only the process that made the group may "
                  "communicate (start processes with the spawn method instead)");
}

std::shared_ptr<Request> OperationQueue::enqueue(std::unique_ptr<Operation> operation,
                                                 std::chrono::milliseconds timeout,
                                                 StagingHooks staging) {
  if (fork_.in_child()) require_owner(operation->describe().c_str());
  auto request = std::make_shared<Request>();
  request->operation_ = operation.get();
  request->owned_ = std::move(operation);
  request->staging_ = std::move(staging);
  request->timeout_ = timeout;
  request->submitted_at_ = Clock::now();
  std::optional<ShortSection> section;
  if (order_ == Order::kUnordered) {
    section.emplace();
    park_at_process_end();
    try {
      step(*request);  // begins the operation before the request is shared
    } catch (...) {
      request->abandon();  // messages of the operation may be in flight
      throw;
    }
  }
  request->self_sufficient_ = request->operation_->self_sufficient();
  const bool awaits_peer = order_ == Order::kUnordered && !request->self_sufficient_;
  request->takeover_delay_ = awaits_peer ? kMessageTakeoverDelay : kTakeoverDelay;

  Lock lock(mutex_);
  if (broken_) {
    lock.unlock();
    const std::string refused = request->operation_->describe();
    request->abandon();
    refuse(refused);
  }
  pending_.push_back(request);
  const bool join = driving_ && order_ == Order::kUnordered;
  lock.unlock();
  if (join) interrupt();
  return request;
}

// Needs no lock, because broken_ never changes once it is set.
void OperationQueue::refuse(const std::string& operation) const {
  throw Error(ErrorKind::kAborted,
              operation + " was refused because the group failed earlier: " + message_of(broken_));
}

void OperationQueue::take_turn(const Lock& /*held*/) {
  driving_ = true;
  progress_thread_ = &parked_here();
}

// Makes the progress thread check the queue's state.
void OperationQueue::interrupt() {
  interrupted_.store(true, std::memory_order_release);
  if (hooks_.wake) hooks_.wake();
}

bool OperationQueue::try_claim(const char* what) {
  if (fork_.in_child()) require_owner(what);
  const Lock lock(mutex_);
  if (must_park()) return false;  // the caller may hold locks; it parks in launch()
  if (broken_) refuse(what);
  if (driving_ || !pending_.empty()) return false;
  take_turn(lock);
  return true;
}

void OperationQueue::run_claimed(Operation& operation, std::chrono::milliseconds timeout,
                                 StagingHooks staging) {
  Request request;
  request.operation_ = &operation;
  request.staging_ = std::move(staging);
  request.timeout_ = timeout;
  Request* const requests[] = {&request};
  RequestOutcome outcome = poll_without_clock(request);
  while (outcome.request == nullptr) {
    outcome = poll_until(requests, Clock::time_point::max());
    if (outcome.request != nullptr) break;
    if (must_park()) leave_claimed(operation);
    interrupted_.store(false, std::memory_order_relaxed);
    if (outcome.interruption) {
      const Error why(ErrorKind::kAborted, operation.describe() + " was interrupted by Ctrl-C");
      outcome.request = &request;
      outcome.error = std::make_exception_ptr(why);
    } else if (const std::exception_ptr why = broken()) {
      outcome = {&request, std::make_exception_ptr(cancelled(operation, why)), nullptr};
    }
  }
  Lock lock(mutex_, std::defer_lock);
  settle(lock, outcome);
  lock.unlock();
  park_at_process_end();
  if (outcome.interruption) std::rethrow_exception(outcome.interruption);
  if (outcome.error) std::rethrow_exception(outcome.error);
}

// Parks the thread of a claimed operation. The operation stays incomplete, so the queue is broken
// for the thread that ends the process.
void OperationQueue::leave_claimed(const Operation& operation) {
  const Error why(ErrorKind::kAborted,
                  operation.describe() + " was in progress on a thread when the process ended");
  Lock lock(mutex_);
  if (!broken_) broken_ = std::make_exception_ptr(why);
  driving_ = false;
  changed_.notify_all();
  park_without(lock);
}

void OperationQueue::unclaim() {
  Lock lock(mutex_, std::defer_lock);
  RequestOutcome nothing;
  settle(lock, nothing);
}

void OperationQueue::launch(const std::shared_ptr<Request>& request, Mode mode) {
  Lock lock(mutex_);
  if (mode == Mode::kSync) {
    try {
      drive(lock, request.get(), Clock::time_point::max());
    } catch (...) {  // Ctrl-C or the end of the process. The request keeps the operation's errors.
      lock.unlock();
      abort("a synchronous operation was interrupted by Ctrl-C");
      if (hooks_.failed) hooks_.failed(broken_);
      throw;
    }
    if (must_park()) park_without(lock);
    return;
  }
  if (!driving_)
    drive(lock, nullptr, Clock::time_point::min());  // often completes earlier operations
  if (request->done()) return;
  if (!driving_ && request == pending_.front() && !request->begun_) {
    drive(lock, nullptr, Clock::time_point::min());
    if (request->done()) return;
  }
  if (order_ == Order::kOrdered && (driving_ || !request->begun_ || !request->self_sufficient_)) {
    request->takeover_delay_ = kImmediately;  // begun_ is read only if no thread drives
  }
  wake_worker(lock, request->takeover_delay_);
}

bool OperationQueue::wait(const std::shared_ptr<Request>& request, Clock::time_point deadline) {
  park_at_process_end();
  if (request->done()) return true;
  require_owner("wait()");
  Lock lock(mutex_);
  drive(lock, request.get(), deadline);
  if (must_park()) park_without(lock);
  return request->done();
}

bool OperationQueue::test(const std::shared_ptr<Request>& request) {
  if (request->done() || fork_.in_child()) return request->done();
  Lock lock(mutex_);
  if (!driving_) drive(lock, nullptr, Clock::time_point::min());
  return request->done();
}

void OperationQueue::when_done(const std::shared_ptr<Request>& request,
                               std::function<void()> callback) {
  if (!request->done()) {
    require_owner("get_future()");
    Lock lock(mutex_);
    const bool last_chance = process_ends();  // no worker will run the callback
    if (last_chance || !driving_) {
      drive(lock, request.get(),
            last_chance ? Clock::time_point::max() : Clock::now() + kCallbackPollTime);
    }
    if (!request->done()) {
      request->callbacks_.push_back(std::move(callback));
      request->takeover_delay_ = kImmediately;
      wake_worker(lock, kImmediately);
      return;
    }
  }
  callback();
}

void OperationQueue::abort(const std::string& reason) {
  if (fork_.in_child()) return;
  Lock lock(mutex_);
  if (must_park()) park_without(lock);
  if (!broken_) broken_ = std::make_exception_ptr(Error(ErrorKind::kAborted, reason));
  while (driving_) {
    if (must_park()) park_without(lock);
    if (process_ends()) return;  // the progress thread did not stop in time
    lock.unlock();
    interrupt();
    lock.lock();
    if (driving_) changed_.wait_for(lock, kAbortRetryPeriod);
  }
  fail_pending(lock);
}

std::exception_ptr OperationQueue::broken() const {
  if (fork_.in_child()) return nullptr;
  Lock lock(mutex_);
  return broken_;
}

// Drives the active requests until `target` is done or `deadline` has passed; without a target,
// until nothing is pending. With a deadline in the past, polls once. With `leading`, also ends if
// there are callbacks to run.
void OperationQueue::drive(Lock& lock, const Request* target, Clock::time_point deadline,
                           bool leading) {
  do {
    if (must_park()) park_without(lock);
    if (target != nullptr && target->done()) return;
    if (leading && !ready_.empty()) return;
    if (progress_thread_parked()) {
      throw Error(ErrorKind::kAborted,
                  "another thread was in the middle of an operation when the process ended");
    }
    if (driving_) {
      const Clock::time_point until = std::min(deadline, Clock::now() + kWatchPeriod);
      if (changed_.wait_until(lock, until) == std::cv_status::timeout) {
        if (until == deadline) return;
        throw_if_interrupted(lock);
      }
      continue;
    }
    if (broken_) fail_pending(lock);
    if (pending_.empty()) return;
    const auto requests = active();
    take_turn(lock);
    interrupted_.store(false, std::memory_order_relaxed);
    lock.unlock();
    RequestOutcome outcome = poll_until(requests, deadline);
    settle(lock, outcome);
    if (outcome.interruption) std::rethrow_exception(outcome.interruption);
  } while (deadline == Clock::time_point::max() || Clock::now() < deadline);
}

void OperationQueue::throw_if_interrupted(Lock& lock) {
  lock.unlock();
  const std::exception_ptr why = interruption();
  lock.lock();
  if (why) std::rethrow_exception(why);
}

// Begins the operation and polls it without reading a clock, because reading one takes as long as a
// short operation within a node. Returns nothing if the operation is not done soon, or as soon as a
// poll makes progress without completing it. Such a poll may have copied much, so the caller checks
// for an abort before the next poll.
OperationQueue::RequestOutcome OperationQueue::poll_without_clock(Request& request) {
  try {
    for (int poll = 0; poll < (oversubscribed_ ? 1 : kPollsWithoutClock); ++poll) {
      const Progress progress = step(request);
      if (progress == Progress::kDone) return {&request, nullptr, nullptr};
      if (progress == Progress::kActive) break;
      relax();
    }
  } catch (...) {
    return {&request, std::current_exception(), nullptr};
  }
  return {};
}

OperationQueue::RequestOutcome OperationQueue::poll_until(std::span<Request* const> requests,
                                                          Clock::time_point deadline) {
  // Calls sleep() of the first operation if progress of all other operations would end the sleep.
  const auto sleep = [requests](Clock::time_point until, bool polled) {
    const bool all_wake = std::ranges::all_of(requests.subspan(1), [](const Request* other) {
      return other->operation_->sleep(Clock::time_point::min(), true) != Slept::kNoWakeup;
    });
    return all_wake ? requests.front()->operation_->sleep(until, polled) : Slept::kNoWakeup;
  };
  Backoff backoff(oversubscribed_, [&sleep, deadline](Clock::time_point until) {
    return sleep(std::min(deadline, until), true);
  });
  for (;;) {
    const Clock::time_point now = Clock::now();
    bool moved = false;
    for (Request* const request : requests) {
      request->driven_since_ = std::min(request->driven_since_, now);
      try {
        const Progress progress = step(*request);
        if (progress == Progress::kDone) return {request, nullptr, nullptr};
        if (progress == Progress::kIdle) require_in_time(*request, now);
        moved = moved || progress == Progress::kActive;
      } catch (...) {
        return {request, std::current_exception(), nullptr};
      }
    }
    if (interrupted_.load(std::memory_order_acquire)) return {};
    if (now >= deadline) return {};
    if (moved) {
      backoff.reset();
      continue;
    }
    if (watch_due_ == Clock::time_point::max()) watch_due_ = now + kWatchPeriod;
    const uint64_t changes = hooks_.changes ? hooks_.changes() : changes_seen_;
    if (now >= watch_due_ || changes != changes_seen_) {
      const RequestOutcome outcome = watch(requests);
      if (outcome.request) return outcome;  // the watch stays due for the other requests
      watch_due_ = Clock::time_point::max();
      changes_seen_ = changes;
      if (const std::exception_ptr why = interruption()) return {nullptr, nullptr, why};
    }
    try {
      if (sleep(std::min(deadline, now + kLongestProgressThreadSleep), false) == Slept::kNoWakeup)
        backoff.pause();
    } catch (...) {
      return {requests.front(), std::current_exception(), nullptr};
    }
  }
}

OperationQueue::RequestOutcome OperationQueue::watch(std::span<Request* const> requests) const {
  if (!hooks_.watch) return {};
  for (Request* const request : requests) {
    try {
      hooks_.watch(*request->operation_);
    } catch (...) {
      return {request, std::current_exception(), nullptr};
    }
  }
  return {};
}

// Begins the request's operation if it has not begun, and polls it; an unordered queue polls it
// only in later steps. Runs the epilogue when the operation is complete.
Progress OperationQueue::step(Request& request) {
  if (!request.begun_) {
    if (request.staging_.prologue) request.staging_.prologue();
    request.begun_ = true;
    request.operation_->begin();
    if (order_ == Order::kUnordered) return Progress::kActive;
  }
  const Progress progress = request.operation_->poll();
  if (progress == Progress::kDone) {
    if (request.staging_.epilogue) request.staging_.epilogue();
  }
  return progress;
}

void OperationQueue::require_in_time(const Request& request, Clock::time_point now) const {
  if (now - request.driven_since_ < request.timeout_) return;
  const std::vector<int> missing = request.operation_->missing();
  throw Error(ErrorKind::kTimeout,
              request.operation_->describe() + " timed out after " +
                  std::to_string(request.timeout_.count()) + " ms; " +
                  (hooks_.name_ranks ? hooks_.name_ranks(missing) : std::string("no rank named")) +
                  torch_timeout_words(request.timeout_));
}

// The calling thread stops being the progress thread: clears driving_ and publishes the outcome.
// Called without the lock; returns with the lock held.
void OperationQueue::settle(Lock& lock, RequestOutcome& outcome) {
  if (outcome.request && outcome.error) {
    if (hooks_.explain) {
      outcome.error = hooks_.explain(*outcome.request->operation_, outcome.error);
    }
    if (hooks_.failed) hooks_.failed(outcome.error);
    outcome.request->abandon();
  } else if (outcome.request) {
    outcome.request->release();
  }
  lock.lock();
  if (outcome.request) {
    if (outcome.error && order_ == Order::kOrdered && !broken_) broken_ = outcome.error;
    if (!outcome.error) watch_due_ = Clock::time_point::max();
  }
  driving_ = false;
  if (outcome.request) finish(lock, outcome.request, outcome.error);
  if (broken_) fail_pending(lock);
  changed_.notify_all();
}

// Marks the request as done, and leaves its callbacks to a worker.
void OperationQueue::finish(Lock& lock, const Request* ended, std::exception_ptr error) {
  const auto position =
      std::find_if(pending_.begin(), pending_.end(),
                   [ended](const std::shared_ptr<Request>& each) { return each.get() == ended; });
  if (position == pending_.end()) return;
  const std::shared_ptr<Request> request = *position;
  pending_.erase(position);
  request->error_ = std::move(error);
  request->done_.store(true, std::memory_order_release);
  for (auto& callback : request->callbacks_) ready_.push_back(std::move(callback));
  const bool callbacks = !request->callbacks_.empty();
  request->callbacks_.clear();
  changed_.notify_all();
  if (callbacks) wake_worker(lock, kImmediately);
}

void OperationQueue::fail_pending(Lock& lock) {
  while (!pending_.empty() && !driving_) {
    if (must_park()) park_without(lock);
    const auto request = pending_.front();
    take_turn(lock);
    lock.unlock();
    const auto error = std::make_exception_ptr(cancelled(*request->operation_, broken_));
    request->abandon();
    lock.lock();
    driving_ = false;
    finish(lock, request.get(), error);
  }
}

std::vector<Request*> OperationQueue::active() const {
  if (order_ == Order::kOrdered) return {pending_.front().get()};
  std::vector<Request*> all;
  for (const auto& request : pending_) all.push_back(request.get());
  return all;
}

// The workers: threads that start on demand and run the callbacks. One worker at a time leads.

void OperationQueue::stop() {
  if (fork_.in_child()) return;
  abort("the group was destroyed");
  Lock lock(mutex_);
  stopping_ = true;
  work_.notify_all();
  follow_.notify_all();
  // A worker that calls this from a callback ends after the callback, so it does not wait for
  // itself.
  const int self = worker_of == this ? 1 : 0;
  changed_.wait(lock, [&] { return workers_ <= self || process_ends(); });
  if (must_park()) park_without(lock);
}

std::shared_ptr<Request> OperationQueue::work_waiting(Clock::time_point now) const {
  for (const auto& request : pending_) {
    if (now - request->submitted_at_ >= request->takeover_delay_) return request;
  }
  return nullptr;
}

// Ensures that a worker leads and checks the queue within `delay`. REQUIRES: the lock is held.
void OperationQueue::wake_worker(const Lock& /*held*/, std::chrono::microseconds delay) {
  if (process_ends()) return;
  last_issue_ = Clock::now();
  if (delay == kMessageTakeoverDelay) last_message_ = last_issue_;
  if (leading_) {
    if (delay < check_period_) work_.notify_one();
  } else if (followers_ > 0) {
    follow_.notify_one();
  } else {
    start_worker();
  }
}

void OperationQueue::start_worker() {
  if (starting_) return;
  try {
    start_thread([self = shared_from_this()] { self->work(); }).detach();
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kExhausted, error.what());
  }
  starting_ = true;  // the lock is held, so the thread has not cleared it yet
  ++workers_;
}

void OperationQueue::work() {
  worker_of = this;
  Lock lock(mutex_);
  starting_ = false;
  while (!stopping_ || !ready_.empty()) {
    if (must_park()) park_without(lock);
    if (!ready_.empty()) {
      run_callbacks(lock);
    } else if (!leading_) {
      leading_ = true;
      lead(lock);
      leading_ = false;
    } else if (!follow(lock)) {
      break;
    }
  }
  --workers_;
  changed_.notify_all();
}

// A callback may wait for this queue's operations, so another worker leads while this thread runs
// callbacks.
void OperationQueue::run_callbacks(Lock& lock) {
  auto batch = std::exchange(ready_, {});
  if (!pending_.empty()) wake_worker(lock, kImmediately);
  callers_.push_back(&parked_here());
  lock.unlock();
  for (const auto& callback : batch) {
    if (must_park()) break;
    callback();
  }
  if (!must_park()) batch.clear();  // destructors of the callbacks may lock this queue
  lock.lock();
  std::erase(callers_, &parked_here());
  if (must_park()) park_without(lock);  // keeps the batch: its destructors may need Python's lock
}

// The work of the leading worker: drives requests whose takeover delay has passed, until there are
// callbacks to run.
void OperationQueue::lead(Lock& lock) {
  while (!stopping_ && ready_.empty()) {
    if (must_park()) park_without(lock);
    const Clock::time_point now = Clock::now();
    if (const std::shared_ptr<Request> request = work_waiting(now)) {
      drive(lock, request.get(), Clock::time_point::max(), /*leading=*/true);
      continue;
    }
    check_period_ = next_check_period(now);
    if (check_period_ == kNever) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, check_period_);
    }
  }
}

std::chrono::microseconds OperationQueue::next_check_period(Clock::time_point now) const {
  if (now - last_message_ < kMessageLingerTime) return kMessageTakeoverDelay;
  if (!pending_.empty() || now - last_issue_ < kWorkerLingerTime) return kTakeoverDelay;
  return kNever;
}

// Waits for a chance to lead or for callbacks. Returns false if neither came within
// kWorkerLingerTime.
bool OperationQueue::follow(Lock& lock) {
  const Clock::time_point end = Clock::now() + kWorkerLingerTime;
  ++followers_;
  while (!stopping_ && leading_ && ready_.empty() && Clock::now() < end) {
    follow_.wait_for(lock, kFollowerCheckPeriod);
  }
  --followers_;
  return stopping_ || !leading_ || !ready_.empty();
}

// The end of the process, when the threads of all queues park.

bool OperationQueue::has_parked(const std::atomic<bool>* parked) {
  return parked->load(std::memory_order_acquire);
}

bool OperationQueue::progress_thread_parked() const {
  return driving_ && has_parked(progress_thread_);
}

void OperationQueue::park_without(Lock& lock) {
  lock.unlock();
  park();
}

// Interrupts all queues before it waits for any queue, because a progress thread may have claimed
// one queue and wait in another.
void OperationQueue::end_all() {
  LiveQueues& live = per_process<LiveQueues>();
  std::unique_lock lock(live.mutex);
  const std::vector<std::weak_ptr<OperationQueue>> all = live.all;
  lock.unlock();
  const Clock::time_point now = Clock::now();
  const auto in_use = [&](const std::weak_ptr<OperationQueue>& each) {
    const auto queue = each.lock();
    return queue && queue->end(now + kProgressThreadEndTimeout, now + kCallbackEndTimeout);
  };
  while (std::ranges::count_if(all, in_use) > 0) std::this_thread::sleep_for(kQueueEndCheckPeriod);
}

// Returns true if the end of the process must still wait for this queue. The end waits until the
// progress thread has parked, but not after `progress_until`. It also waits for threads that run
// callbacks, but not after `callbacks_until`. process_ends() is true, so a thread that takes mutex_
// later parks.
bool OperationQueue::end(Clock::time_point progress_until, Clock::time_point callbacks_until) {
  const Lock lock(mutex_);
  work_.notify_all();
  follow_.notify_all();
  changed_.notify_all();  // a thread in stop() parks
  const Clock::time_point now = Clock::now();
  const bool drives = driving_ && !progress_thread_parked() && now < progress_until;
  // Calls the hook `wake` with the lock held. The hook is valid: the progress thread needs the lock
  // to stop, and the group waits for that thread before it is destroyed.
  if (drives) interrupt();
  return drives || (now < callbacks_until && !std::ranges::all_of(callers_, has_parked));
}

}  // namespace hbm::progress
