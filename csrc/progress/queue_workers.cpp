// The workers of an OperationQueue: threads that start on demand, take the lead in turn, and run
// the callbacks.
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/process_end.h"
#include "base/start_thread.h"
#include "progress/operation_queue.h"

namespace hbm {
namespace {

constexpr std::chrono::seconds kLingerFor{1};
constexpr std::chrono::milliseconds kLingerForMessages{20};  // at kAdoptMessageAfter
constexpr std::chrono::milliseconds kFollowerLooks{20};

thread_local const OperationQueue* worker_of = nullptr;  // the queue whose worker this thread is

}  // namespace

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
  if (patience == kAdoptMessageAfter) last_message_ = last_issue_;
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
  if (now - last_message_ < kLingerForMessages) return kAdoptMessageAfter;
  if (!pending_.empty() || now - last_issue_ < kLingerFor) return kAdoptAfter;
  return kNever;
}

// Waits for a chance to lead or for callbacks; false when a second brought neither.
bool OperationQueue::follow(Lock& lock) {
  const Clock::time_point end = Clock::now() + kLingerFor;
  ++followers_;
  while (!stopping_ && leading_ && ready_.empty() && Clock::now() < end) {
    follow_.wait_for(lock, kFollowerLooks);
  }
  --followers_;
  return stopping_ || !leading_ || !ready_.empty();
}

}  // namespace hbm
