// A thread that sleeps until the other end of a connection closes it, for clients that do not touch
// their sockets while they copy.
//
// Threads: hung_up() may be called from any thread and costs one load. The sockets must outlive the
// watch.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "box/transport/doorbell.h"

namespace hbm::transport {

class HangupWatch {
 public:
  // `then` is called once, by the watch's thread, after the first of `sockets` has hung up.
  HangupWatch(std::vector<int> sockets, std::function<void()> then);
  ~HangupWatch();
  HangupWatch(const HangupWatch&) = delete;
  HangupWatch& operator=(const HangupWatch&) = delete;

  bool hung_up() const noexcept { return hung_up_.load(std::memory_order_acquire); }

 private:
  void watch(const std::vector<int>& sockets);

  std::atomic<bool> hung_up_{false};
  const std::function<void()> then_;
  Doorbell stop_;
  std::thread thread_;
};

}  // namespace hbm::transport
