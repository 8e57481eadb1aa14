#include "progress/operation_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "base/process_end.h"
#include "base/waiting.h"
#include "progress/backoff.h"

namespace hbm {
namespace {

constexpr std::chrono::milliseconds kWatchEvery{250};
constexpr std::chrono::milliseconds kLongestWait{10};  // then the clock and the state count again
constexpr std::chrono::microseconds kGlance{20};       // cheaper than waking the worker
constexpr int kFirstLooks = 50;                        // before a clock is read

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
  ticket->patience_ = large_message ? kAdoptMessageAfter : kAdoptAfter;

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
      drive(lock, ticket.get(), last_chance ? Clock::time_point::max() : Clock::now() + kGlance);
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
    if (driving_) changed_.wait_for(lock, std::chrono::milliseconds(1));
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
      const Clock::time_point look = std::min(deadline, Clock::now() + kWatchEvery);
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
    for (int look = 0; look < (crowded_ ? 1 : kFirstLooks); ++look) {
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
    if (watch_due_ == Clock::time_point::max()) watch_due_ = now + kWatchEvery;
    if (now >= watch_due_) {
      const TicketOutcome outcome = watch(tickets);
      if (outcome.ticket) return outcome;  // the watch stays due, for the other tickets
      watch_due_ = Clock::time_point::max();
      if (const std::exception_ptr why = interruption()) return {nullptr, nullptr, why};
    }
    try {
      if (sleep(std::min(deadline, now + kLongestWait), false) == Slept::kNoWakeup) backoff.pause();
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

}  // namespace hbm
