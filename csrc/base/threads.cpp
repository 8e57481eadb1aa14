#include "base/threads.h"

#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace hbm {

bool run_abandonable(std::function<void()> call, std::chrono::steady_clock::time_point deadline) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(call));
  std::future<void> result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_until(deadline) != std::future_status::ready) return false;
  result.get();
  return true;
}

}  // namespace hbm
