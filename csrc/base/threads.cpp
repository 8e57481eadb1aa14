#include "base/threads.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

#include "base/process_end.h"
#include "base/start_thread.h"
#include "base/tuning.h"

namespace hbm {

bool run_abandonable(std::function<void()> call, std::chrono::steady_clock::time_point deadline,
                     const std::function<void()>& check) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(call));
  std::future<void> result = task->get_future();
  start_thread([task] { (*task)(); }).detach();
  const auto step = [&] {
    return check ? std::min(deadline, std::chrono::steady_clock::now() + kCallCheckPeriod)
                 : deadline;
  };
  while (result.wait_until(step()) != std::future_status::ready) {
    // Check the deadline before the thread parks. A caller that only starts the call passes a
    // deadline in the past. It may hold a lock that the end of the process takes: it must not park.
    if (std::chrono::steady_clock::now() >= deadline) return false;
    park_at_process_end();
    if (check) check();
  }
  result.get();
  return true;
}

}  // namespace hbm
