// The run queue of a box: the sessions with requests, in order.
//
// Event loops append each session that has a new request. Each handler thread takes the first
// session, executes one of its requests, and appends the session again if it has more. So no client
// starves another.
//
// A session is in the queue at most once, and the queue has room for all sessions. So put() never
// waits, and no event loop waits for a handler.
//
// Threads: put() and close() may be called from any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hbm::box::server {

class Session;

class RunQueue {
 public:
  using Handler = std::function<void(std::shared_ptr<Session>)>;

  // `handler` runs on `handlers` threads, and must not throw.
  RunQueue(size_t capacity, size_t handlers, Handler handler);
  ~RunQueue();  // closes
  RunQueue(const RunQueue&) = delete;
  RunQueue& operator=(const RunQueue&) = delete;

  // Returns false, with nothing changed, if the queue is closed. Throws std::length_error if the
  // queue is full, which its capacity must prevent.
  [[nodiscard]] bool put(const std::shared_ptr<Session>& session);

  // Returns when the queue is empty and the threads have ended. REQUIRES: not called by a handler.
  void close();

 private:
  void handle();
  std::shared_ptr<Session> take();  // null: closed and empty

  const Handler handler_;
  std::mutex mutex_;  // guards all below; no other lock is taken under it
  std::condition_variable filled_;
  std::vector<std::shared_ptr<Session>> sessions_;
  size_t first_ = 0;
  size_t count_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;  // changed only by the constructor and close()
};

}  // namespace hbm::box::server
