// Has the threads of all queues of a process park when the process ends.
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

void OperationQueue::park_without(Lock& lock) {
  lock.unlock();
  park();
}

// The queues are interrupted together, and then awaited.
void OperationQueue::end_all() {
  LiveQueues& live = per_process<LiveQueues>();
  std::unique_lock lock(live.mutex);
  const std::vector<std::weak_ptr<OperationQueue>> all = live.all;
  lock.unlock();
  const Clock::time_point now = Clock::now();
  for (const auto& each : all) {
    if (const auto queue = each.lock()) queue->end(now + kDriversEndIn, now + kCallbacksEndIn);
  }
}

// Returns once no other thread drives this queue or begins an operation, and no callback runs; or
// when their time is over. process_ends() is true, so whoever takes mutex_ after this parks.
void OperationQueue::end(Clock::time_point drivers_until, Clock::time_point callbacks_until) {
  Lock lock(mutex_);
  work_.notify_all();
  follow_.notify_all();
  for (;;) {
    const Clock::time_point now = Clock::now();
    const bool drives = (driving_ || beginning_.load() > 0) && now < drivers_until;
    if (!drives && (calling_ == 0 || now >= callbacks_until)) return;
    // With the lock held, which the driver needs to end: so the group, which ends its driver before
    // it goes, is still there.
    if (driving_) interrupt();
    changed_.wait_for(lock, kLookEvery);
  }
}

}  // namespace hbm
