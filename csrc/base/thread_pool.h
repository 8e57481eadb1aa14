// A pool of threads that help callers with independent parts of work. All callers share the
// threads.
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
  ~ThreadPool();  // REQUIRES: no run() is in progress.
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Grows the pool to `helpers` threads, or to fewer if the process may not start that many.
  // Threads: any.
  void grow(unsigned helpers);

  // Calls part(0) .. part(parts - 1), each once, on the calling thread and on idle helpers. Returns
  // when all calls have returned. A single part takes no lock and wakes no thread. If parts throw,
  // run() throws the first of these exceptions after all parts have ended. REQUIRES: parts >= 1.
  // Threads: any, several together.
  void run(uint32_t parts, const std::function<void(uint32_t)>& part);

 private:
  struct Task;
  void help();
  // Runs parts of the task until every part has begun. `lock` holds mutex_.
  void work(Task& task, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards the members below, and the tasks
  std::condition_variable task_added_;
  std::deque<Task*> tasks_;  // with parts that have not begun
  bool ending_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace hbm
