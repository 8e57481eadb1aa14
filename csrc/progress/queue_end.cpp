// Has the threads of all queues of a process park when the process ends.
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/process_end.h"
#include "progress/operation_queue.h"

namespace hbm {
namespace {

// A step of an operation never waits, so a driver that takes longer copies gigabytes.
constexpr std::chrono::seconds kDriversEndIn{10};
constexpr std::chrono::seconds kCallbacksEndIn{1};  // one may wait for another rank
constexpr std::chrono::milliseconds kLookEvery{1};

struct LiveQueues {
  std::mutex mutex;  // guards `all`; taken alone
  std::vector<std::weak_ptr<OperationQueue>> all;
};

}  // namespace

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
    return queue && queue->end(now + kDriversEndIn, now + kCallbacksEndIn);
  };
  while (std::ranges::count_if(all, in_use) > 0) std::this_thread::sleep_for(kLookEvery);
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
