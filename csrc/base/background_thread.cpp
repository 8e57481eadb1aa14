#include "base/background_thread.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "base/fork.h"
#include "base/start_thread.h"
#include "base/threads.h"
#include "base/tuning.h"

namespace hbm {
struct BackgroundThread::Run {
  const ForkGuard fork;
  std::function<void()> body;
  const std::function<void()> interrupt;
};

// The background threads of this process.
class BackgroundThread::All {
 public:
  static All& here() { return per_process<All>(); }

  void start(const std::shared_ptr<Run>& run) {
    static std::once_flag once;
    std::call_once(once, [] { std::atexit([] { here().end(); }); });
    const std::lock_guard lock(mutex_);
    const SignalsHeldOff held;
    start_thread([this, run] { live(run); }).detach();
    running_.insert(run);
  }

  // Calls `interrupt` without the lock, because `interrupt` may take other locks. Then waits until
  // the body has returned.
  void stop(const std::shared_ptr<Run>& run) {
    run->interrupt();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kThreadEndTimeout, [&] { return !running_.contains(run); });
  }

 private:
  void live(std::shared_ptr<Run> run) {
    run->body();
    run->body = nullptr;  // also destroys the objects that the body owns
    const std::lock_guard lock(mutex_);
    running_.erase(run);
    changed_.notify_all();
  }

  void end() {
    std::unique_lock lock(mutex_);
    const std::set<std::shared_ptr<Run>> running = running_;
    lock.unlock();
    for (const auto& run : running) run->interrupt();
    lock.lock();
    changed_.wait_for(lock, kThreadEndTimeout, [this] { return running_.empty(); });
  }

  std::mutex mutex_;  // taken alone
  std::condition_variable changed_;
  std::set<std::shared_ptr<Run>> running_;  // guarded by mutex_
};

BackgroundThread::BackgroundThread(std::function<void()> body, std::function<void()> interrupt)
    : run_(new Run{{}, std::move(body), std::move(interrupt)}) {
  All::here().start(run_);
}

void BackgroundThread::stop() {
  if (!run_->fork.in_child()) All::here().stop(run_);
}

}  // namespace hbm
