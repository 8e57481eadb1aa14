// The message ring of a box: the sessions that have requests, in the order in which they got them.
//
// Event loops put a session in; a pool of handler threads takes sessions out, and each carries out
// one request before it puts the session back behind the others. So no client starves another.
//
// Every session is in the ring at most once, and a ring has room for all the sessions that can be:
// put() never waits, and an event loop that answers the clients never depends on the handlers.
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

namespace hbm::box {

class Session;

class MessageRing {
 public:
  using Handler = std::function<void(std::shared_ptr<Session>)>;

  // `handler` runs on `handlers` threads, and must not throw.
  MessageRing(size_t capacity, size_t handlers, Handler handler);
  ~MessageRing();  // closes
  MessageRing(const MessageRing&) = delete;
  MessageRing& operator=(const MessageRing&) = delete;

  // False: the ring is closed, and nothing has changed.
  // Throws std::length_error when the ring is full, which its capacity rules out.
  [[nodiscard]] bool put(const std::shared_ptr<Session>& session);

  // Returns when the ring is empty and the threads have ended. REQUIRES: not from a handler.
  void close();

 private:
  void handle();
  std::shared_ptr<Session> take();  // null: closed and empty

  const Handler handler_;
  std::mutex mutex_;  // guards all below, and is the last to be taken
  std::condition_variable filled_;
  std::vector<std::shared_ptr<Session>> slots_;
  size_t first_ = 0;
  size_t count_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;  // changed by the constructor and close() alone
};

}  // namespace hbm::box
