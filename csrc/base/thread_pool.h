// Threads that help a caller with work that falls into independent parts. All callers share them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hbm {

class ThreadPool {
 public:
  explicit ThreadPool(unsigned helpers);
  ~ThreadPool();  // REQUIRES: no run() is under way.
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Sees to it that there are so many helpers, as far as the process may have threads.
  // Threads: any.
  void grow(unsigned helpers);

  // Calls part(0) .. part(parts - 1), each once, on the calling thread and on helpers that have
  // nothing to do, and returns when all have returned. One part takes no lock and wakes nobody.
  // What a part throws is thrown again once all have ended; the first, if several do.
  // Threads: any, several at once.
  void run(uint32_t parts, const std::function<void(uint32_t)>& part);

 private:
  struct Task;
  void help();
  // Carries out parts of the task until none is left to begin. `lock` holds mutex_.
  void work(Task& task, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards all below, and the tasks
  std::condition_variable task_added_;
  std::deque<Task*> tasks_;  // that have parts left to begin
  bool ending_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace hbm
