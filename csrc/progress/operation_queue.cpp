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

namespace hbm {
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

Error given_up(const Operation& operation, const std::exception_ptr& cause) {
  return {ErrorKind::kAborted, operation.describe() + " was given up: " + message_of(cause)};
}

}  // namespace

void Ticket::let_go() {
  operation_ = nullptr;
  owned_.reset();
  frame_ = {};
}

void Ticket::abandon() {
  if (begun_) {
    operation_->abandon();
    if (operation_->peers_may_write()) {
      static std::mutex mutex;
      static auto* const kept = new std::vector<Frame>;
      const std::lock_guard lock(mutex);
      kept->push_back(std::move(frame_));
    }
  }
  let_go();
}

OperationQueue::OperationQueue(Order order, bool crowded, Hooks hooks)
    : order_(order), crowded_(crowded), hooks_(std::move(hooks)) {}

std::shared_ptr<OperationQueue> OperationQueue::create(Order order, bool crowded, Hooks hooks) {
  const std::shared_ptr<OperationQueue> queue(new OperationQueue(order, crowded, std::move(hooks)));
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

std::shared_ptr<Ticket> OperationQueue::enqueue(std::unique_ptr<Operation> operation,
                                                std::chrono::milliseconds timeout, Frame frame) {
  if (fork_.in_child()) require_owner(operation->describe().c_str());
  auto ticket = std::make_shared<Ticket>();
  ticket->operation_ = operation.get();
  ticket->owned_ = std::move(operation);
  ticket->frame_ = std::move(frame);
  ticket->timeout_ = timeout;
  ticket->submitted_at_ = Clock::now();
  std::optional<ShortSection> section;
  if (order_ == Order::kUnordered) {
    section.emplace();
    park_at_process_end();
    try {
      step(*ticket);  // begins it, before it is shared
    } catch (...) {
      ticket->abandon();  // the first of its messages may be on their way
      throw;
    }
  }
  ticket->small_ = ticket->operation_->self_sufficient();
  const bool large_message = order_ == Order::kUnordered && !ticket->small_;
  ticket->patience_ = large_message ? kMessageAdoptionPatience : kAdoptionPatience;

  Lock lock(mutex_);
  if (broken_) {
    lock.unlock();
    const std::string refused = ticket->operation_->describe();
    ticket->abandon();
    refuse(refused);
  }
  pending_.push_back(ticket);
  const bool join = driving_ && order_ == Order::kUnordered;
  lock.unlock();
  if (join) interrupt();
  return ticket;
}

// Needs no lock: broken_ stays as it is once it is set.
void OperationQueue::refuse(const std::string& operation) const {
  throw Error(ErrorKind::kAborted,
              operation + " was refused because the group failed earlier: " + message_of(broken_));
}

void OperationQueue::take_turn(const Lock& /*held*/) {
  driving_ = true;
  driver_ = &parked_here();
}

// Makes the driver look at the queue's state again.
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
                                 Frame frame) {
  Ticket ticket;
  ticket.operation_ = &operation;
  ticket.frame_ = std::move(frame);
  ticket.timeout_ = timeout;
  Ticket* const tickets[] = {&ticket};
  TicketOutcome outcome = look_first(ticket);
  while (outcome.ticket == nullptr) {
    outcome = poll_until(tickets, Clock::time_point::max());
    if (outcome.ticket != nullptr) break;
    if (must_park()) leave_claimed(operation);
    interrupted_.store(false, std::memory_order_relaxed);
    if (outcome.interruption) {
      const Error why(ErrorKind::kAborted, operation.describe() + " was interrupted by Ctrl-C");
      outcome.ticket = &ticket;
      outcome.error = std::make_exception_ptr(why);
    } else if (const std::exception_ptr why = broken()) {
      outcome = {&ticket, std::make_exception_ptr(given_up(operation, why)), nullptr};
    }
  }
  Lock lock(mutex_, std::defer_lock);
  settle(lock, outcome);
  lock.unlock();
  park_at_process_end();
  if (outcome.interruption) std::rethrow_exception(outcome.interruption);
  if (outcome.error) std::rethrow_exception(outcome.error);
}

// Parks the thread of a claimed operation. The operation stays half done, so the queue is broken
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
  TicketOutcome nothing;
  settle(lock, nothing);
}

void OperationQueue::launch(const std::shared_ptr<Ticket>& ticket, Mode mode) {
  Lock lock(mutex_);
  if (mode == Mode::kSync) {
    try {
      drive(lock, ticket.get(), Clock::time_point::max());
    } catch (...) {  // an interruption: errors are in the ticket
      lock.unlock();
      abort("a synchronous operation was interrupted by Ctrl-C");
      if (hooks_.failed) hooks_.failed(broken_);
      throw;
    }
    if (must_park()) park_without(lock);
    return;
  }
  if (!driving_) drive(lock, nullptr, Clock::time_point::min());  // often clears what is in front
  if (ticket->done()) return;
  if (!driving_ && ticket == pending_.front() && !ticket->begun_) {
    drive(lock, nullptr, Clock::time_point::min());
    if (ticket->done()) return;
  }
  if (order_ == Order::kOrdered && (driving_ || !ticket->begun_ || !ticket->small_)) {
    ticket->patience_ = kAtOnce;  // begun_ is the driver's, if there is one
  }
  wake_worker(lock, ticket->patience_);
}

bool OperationQueue::wait(const std::shared_ptr<Ticket>& ticket, Clock::time_point deadline) {
  park_at_process_end();
  if (ticket->done()) return true;
  require_owner("wait()");
  Lock lock(mutex_);
  drive(lock, ticket.get(), deadline);
  if (must_park()) park_without(lock);
  return ticket->done();
}

bool OperationQueue::test(const std::shared_ptr<Ticket>& ticket) {
  if (ticket->done() || fork_.in_child()) return ticket->done();
  Lock lock(mutex_);
  if (!driving_) drive(lock, nullptr, Clock::time_point::min());
  return ticket->done();
}

void OperationQueue::when_done(const std::shared_ptr<Ticket>& ticket,
                               std::function<void()> callback) {
  if (!ticket->done()) {
    require_owner("get_future()");
    Lock lock(mutex_);
    const bool last_chance = process_ends();  // no worker runs the callback
    if (last_chance || !driving_) {
      drive(lock, ticket.get(),
            last_chance ? Clock::time_point::max() : Clock::now() + kCallbackPollTime);
    }
    if (!ticket->done()) {
      ticket->callbacks_.push_back(std::move(callback));
      ticket->patience_ = kAtOnce;
      wake_worker(lock, kAtOnce);
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
    if (process_ends()) return;  // the driver did not come to its end in time
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

// Drives what is active until `target` is done or `deadline` has passed; with no target, until
// nothing is pending. A deadline in the past means one attempt.
void OperationQueue::drive(Lock& lock, const Ticket* target, Clock::time_point deadline,
                           bool leading) {
  do {
    if (must_park()) park_without(lock);
    if (target != nullptr && target->done()) return;
    if (leading && !ready_.empty()) return;
    if (driver_parked()) {
      throw Error(ErrorKind::kAborted,
                  "another thread was in the middle of an operation when the process ended");
    }
    if (driving_) {
      const Clock::time_point look = std::min(deadline, Clock::now() + kWatchPeriod);
      if (changed_.wait_until(lock, look) == std::cv_status::timeout) {
        if (look == deadline) return;
        throw_if_interrupted(lock);
      }
      continue;
    }
    if (broken_) fail_pending(lock);
    if (pending_.empty()) return;
    const auto tickets = active();
    take_turn(lock);
    interrupted_.store(false, std::memory_order_relaxed);
    lock.unlock();
    TicketOutcome outcome = poll_until(tickets, deadline);
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

// Begins the operation and looks for its end without reading a clock, which takes as long as a
// small operation within a node. Returns nothing if it is not done soon, or once it has moved: a
// poll that moves may copy much, so an abort is looked for before the next.
OperationQueue::TicketOutcome OperationQueue::look_first(Ticket& ticket) {
  try {
    for (int look = 0; look < (crowded_ ? 1 : kPollsWithoutClock); ++look) {
      const Progress progress = step(ticket);
      if (progress == Progress::kDone) return {&ticket, nullptr, nullptr};
      if (progress == Progress::kActive) break;
      relax();
    }
  } catch (...) {
    return {&ticket, std::current_exception(), nullptr};
  }
  return {};
}

OperationQueue::TicketOutcome OperationQueue::poll_until(std::span<Ticket* const> tickets,
                                                         Clock::time_point deadline) {
  // Sleeps for the first operation, unless another one would not end the sleep.
  const auto sleep = [tickets](Clock::time_point until, bool polled) {
    const bool all_wake = std::ranges::all_of(tickets.subspan(1), [](const Ticket* other) {
      return other->operation_->sleep(Clock::time_point::min(), true) != Slept::kNoWakeup;
    });
    return all_wake ? tickets.front()->operation_->sleep(until, polled) : Slept::kNoWakeup;
  };
  Backoff backoff(crowded_, [&sleep, deadline](Clock::time_point until) {
    return sleep(std::min(deadline, until), true);
  });
  for (;;) {
    const Clock::time_point now = Clock::now();
    bool moved = false;
    for (Ticket* const ticket : tickets) {
      ticket->driven_since_ = std::min(ticket->driven_since_, now);
      try {
        const Progress progress = step(*ticket);
        if (progress == Progress::kDone) return {ticket, nullptr, nullptr};
        if (progress == Progress::kIdle) require_in_time(*ticket, now);
        moved = moved || progress == Progress::kActive;
      } catch (...) {
        return {ticket, std::current_exception(), nullptr};
      }
    }
    if (interrupted_.load(std::memory_order_acquire)) return {};
    if (now >= deadline) return {};
    if (moved) {
      backoff.reset();
      continue;
    }
    if (watch_due_ == Clock::time_point::max()) watch_due_ = now + kWatchPeriod;
    if (now >= watch_due_) {
      const TicketOutcome outcome = watch(tickets);
      if (outcome.ticket) return outcome;  // the watch stays due, for the other tickets
      watch_due_ = Clock::time_point::max();
      if (const std::exception_ptr why = interruption()) return {nullptr, nullptr, why};
    }
    try {
      if (sleep(std::min(deadline, now + kLongestDriverSleep), false) == Slept::kNoWakeup)
        backoff.pause();
    } catch (...) {
      return {tickets.front(), std::current_exception(), nullptr};
    }
  }
}

OperationQueue::TicketOutcome OperationQueue::watch(std::span<Ticket* const> tickets) const {
  if (!hooks_.watch) return {};
  for (Ticket* const ticket : tickets) {
    try {
      hooks_.watch(*ticket->operation_);
    } catch (...) {
      return {ticket, std::current_exception(), nullptr};
    }
  }
  return {};
}

// Begins the ticket's operation or moves it on; runs the epilogue when it is complete.
Progress OperationQueue::step(Ticket& ticket) {
  if (!ticket.begun_) {
    if (ticket.frame_.prologue) ticket.frame_.prologue();
    ticket.begun_ = true;
    ticket.operation_->begin();
    if (order_ == Order::kUnordered) return Progress::kActive;
  }
  const Progress progress = ticket.operation_->poll();
  if (progress == Progress::kDone) {
    if (ticket.frame_.epilogue) ticket.frame_.epilogue();
  }
  return progress;
}

void OperationQueue::require_in_time(const Ticket& ticket, Clock::time_point now) const {
  if (now - ticket.driven_since_ < ticket.timeout_) return;
  const std::vector<int> missing = ticket.operation_->missing();
  throw Error(ErrorKind::kTimeout,
              ticket.operation_->describe() + " timed out after " +
                  std::to_string(ticket.timeout_.count()) + " ms; " +
                  (hooks_.name_ranks ? hooks_.name_ranks(missing) : std::string("no rank named")) +
                  torch_timeout_words(ticket.timeout_));
}

// Ends the driver's turn: takes back driving_ and publishes what came of it. Comes without the
// lock, and leaves with it.
void OperationQueue::settle(Lock& lock, TicketOutcome& outcome) {
  if (outcome.ticket && outcome.error) {
    if (hooks_.explain) {
      outcome.error = hooks_.explain(*outcome.ticket->operation_, outcome.error);
    }
    outcome.ticket->abandon();
    if (hooks_.failed) hooks_.failed(outcome.error);
  } else if (outcome.ticket) {
    outcome.ticket->let_go();
  }
  lock.lock();
  if (outcome.ticket) {
    if (outcome.error && order_ == Order::kOrdered && !broken_) broken_ = outcome.error;
    if (!outcome.error) watch_due_ = Clock::time_point::max();
  }
  driving_ = false;
  if (outcome.ticket) finish(lock, outcome.ticket, outcome.error);
  if (broken_) fail_pending(lock);
  changed_.notify_all();
}

// Makes the ticket done, and leaves its callbacks to a worker.
void OperationQueue::finish(Lock& lock, const Ticket* ended, std::exception_ptr error) {
  const auto place =
      std::find_if(pending_.begin(), pending_.end(),
                   [ended](const std::shared_ptr<Ticket>& each) { return each.get() == ended; });
  if (place == pending_.end()) return;
  const std::shared_ptr<Ticket> ticket = *place;
  pending_.erase(place);
  ticket->error_ = std::move(error);
  ticket->done_.store(true, std::memory_order_release);
  for (auto& callback : ticket->callbacks_) ready_.push_back(std::move(callback));
  const bool callbacks = !ticket->callbacks_.empty();
  ticket->callbacks_.clear();
  changed_.notify_all();
  if (callbacks) wake_worker(lock, kAtOnce);
}

void OperationQueue::fail_pending(Lock& lock) {
  while (!pending_.empty() && !driving_) {
    if (must_park()) park_without(lock);
    const auto ticket = pending_.front();
    take_turn(lock);
    lock.unlock();
    const auto error = std::make_exception_ptr(given_up(*ticket->operation_, broken_));
    ticket->abandon();
    lock.lock();
    driving_ = false;
    finish(lock, ticket.get(), error);
  }
}

std::vector<Ticket*> OperationQueue::active() const {
  if (order_ == Order::kOrdered) return {pending_.front().get()};
  std::vector<Ticket*> all;
  for (const auto& ticket : pending_) all.push_back(ticket.get());
  return all;
}

// The workers: threads that start on demand, take the lead in turn, and run the callbacks.

void OperationQueue::stop() {
  if (fork_.in_child()) return;
  abort("the group was destroyed");
  Lock lock(mutex_);
  stopping_ = true;
  work_.notify_all();
  follow_.notify_all();
  // A worker that calls this (from a callback) ends after it.
  const int self = worker_of == this ? 1 : 0;
  changed_.wait(lock, [&] { return workers_ <= self || process_ends(); });
  if (must_park()) park_without(lock);
}

std::shared_ptr<Ticket> OperationQueue::work_waiting(Clock::time_point now) const {
  for (const auto& ticket : pending_) {
    if (now - ticket->submitted_at_ >= ticket->patience_) return ticket;
  }
  return nullptr;
}

// Sees to it that a worker leads and looks within `patience`; the lock is held.
void OperationQueue::wake_worker(const Lock& /*held*/, std::chrono::microseconds patience) {
  if (process_ends()) return;
  last_issue_ = Clock::now();
  if (patience == kMessageAdoptionPatience) last_message_ = last_issue_;
  if (leading_) {
    if (patience < looks_every_) work_.notify_one();
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
  starting_ = true;  // the lock is held, so the thread has not looked yet
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

// A callback may wait for anything, an operation of this queue included, so the one who runs it
// does not lead meanwhile, and somebody is there to.
void OperationQueue::run_callbacks(Lock& lock) {
  auto batch = std::exchange(ready_, {});
  if (!pending_.empty()) wake_worker(lock, kAtOnce);
  callers_.push_back(&parked_here());
  lock.unlock();
  for (const auto& callback : batch) {
    if (must_park()) break;
    callback();
  }
  if (!must_park()) batch.clear();  // what they hold may lock this queue when it goes
  lock.lock();
  std::erase(callers_, &parked_here());
  if (must_park()) park_without(lock);  // with the batch: it may need Python's lock to go
}

// The leader's turn: drives what waits for a worker, until there are callbacks to run.
void OperationQueue::lead(Lock& lock) {
  while (!stopping_ && ready_.empty()) {
    if (must_park()) park_without(lock);
    const Clock::time_point now = Clock::now();
    if (const std::shared_ptr<Ticket> ticket = work_waiting(now)) {
      drive(lock, ticket.get(), Clock::time_point::max(), /*leading=*/true);
      continue;
    }
    looks_every_ = look_again_after(now);
    if (looks_every_ == kNever) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, looks_every_);
    }
  }
}

std::chrono::microseconds OperationQueue::look_again_after(Clock::time_point now) const {
  if (now - last_message_ < kMessageLingerTime) return kMessageAdoptionPatience;
  if (!pending_.empty() || now - last_issue_ < kWorkerLingerTime) return kAdoptionPatience;
  return kNever;
}

// Waits for a chance to lead or for callbacks; false when a second brought neither.
bool OperationQueue::follow(Lock& lock) {
  const Clock::time_point end = Clock::now() + kWorkerLingerTime;
  ++followers_;
  while (!stopping_ && leading_ && ready_.empty() && Clock::now() < end) {
    follow_.wait_for(lock, kFollowerCheckPeriod);
  }
  --followers_;
  return stopping_ || !leading_ || !ready_.empty();
}

// The end of the process, at which the threads of all queues park.

bool OperationQueue::has_parked(const std::atomic<bool>* parked) {
  return parked->load(std::memory_order_acquire);
}

bool OperationQueue::driver_parked() const { return driving_ && has_parked(driver_); }

void OperationQueue::park_without(Lock& lock) {
  lock.unlock();
  park();
}

// Interrupts all queues before it waits for any: a driver may have claimed one queue and wait in
// another.
void OperationQueue::end_all() {
  LiveQueues& live = per_process<LiveQueues>();
  std::unique_lock lock(live.mutex);
  const std::vector<std::weak_ptr<OperationQueue>> all = live.all;
  lock.unlock();
  const Clock::time_point now = Clock::now();
  const auto in_use = [&](const std::weak_ptr<OperationQueue>& each) {
    const auto queue = each.lock();
    return queue && queue->end(now + kDriverEndPatience, now + kCallbackEndPatience);
  };
  while (std::ranges::count_if(all, in_use) > 0) std::this_thread::sleep_for(kQueueEndCheckPeriod);
}

// Returns true if a thread drives this queue or runs a callback, has not parked in it, and its time
// is not over. process_ends() is true, so a thread that takes mutex_ later parks.
bool OperationQueue::end(Clock::time_point drivers_until, Clock::time_point callbacks_until) {
  const Lock lock(mutex_);
  work_.notify_all();
  follow_.notify_all();
  changed_.notify_all();  // stop() parks
  const Clock::time_point now = Clock::now();
  const bool drives = driving_ && !driver_parked() && now < drivers_until;
  // With the lock held, which the driver needs to end: so the group, which ends its driver before
  // it goes, is still there.
  if (drives) interrupt();
  return drives || (now < callbacks_until && !std::ranges::all_of(callers_, has_parked));
}

}  // namespace hbm
