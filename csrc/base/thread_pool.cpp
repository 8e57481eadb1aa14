#include "base/thread_pool.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace hbm {

struct ThreadPool::Task {
  const std::function<void(uint32_t)>& part;
  const uint32_t parts;
  uint32_t begun = 0;
  uint32_t ended = 0;
  std::exception_ptr failure{};
  std::condition_variable done{};
};

ThreadPool::ThreadPool(unsigned helpers) {
  for (unsigned i = 0; i < helpers; ++i) helpers_.emplace_back([this] { help(); });
}

void ThreadPool::grow(unsigned helpers) {
  const std::lock_guard lock(mutex_);
  if (helpers_.size() >= helpers) return;
  const SignalsHeldOff held;
  try {
    while (helpers_.size() < helpers) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    return;  // existing helpers do the work
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  task_added_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::run(uint32_t parts, const std::function<void(uint32_t)>& part) {
  if (parts == 1) return part(0);
  Task task{part, parts};
  std::unique_lock lock(mutex_);
  tasks_.push_back(&task);
  const size_t wanted = std::min<size_t>(parts - 1, helpers_.size());
  for (size_t i = 0; i < wanted; ++i) task_added_.notify_one();
  work(task, lock);
  task.done.wait(lock, [&] { return task.ended == task.parts; });
  if (task.failure) std::rethrow_exception(task.failure);
}

void ThreadPool::help() {
  std::unique_lock lock(mutex_);
  while (true) {
    task_added_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (ending_) return;
    work(*tasks_.front(), lock);
  }
}

void ThreadPool::work(Task& task, std::unique_lock<std::mutex>& lock) {
  bool last = false;
  // run() may destroy the task as soon as the last part has ended: check `last` before `task`.
  while (!last && task.begun < task.parts) {
    const uint32_t part = task.begun++;
    if (task.begun == task.parts) std::erase(tasks_, &task);
    lock.unlock();
    std::exception_ptr failure{};
    try {
      task.part(part);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !task.failure) task.failure = std::move(failure);
    last = ++task.ended == task.parts;
    if (last) task.done.notify_one();
  }
}

}  // namespace hbm
