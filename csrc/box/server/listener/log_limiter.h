// Warnings that clients can cause, so that no client can fill the log: a few in a while, and then
// how many more there were.
//
// Threads: warn() may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace hbm::box {

class LogLimiter {
 public:
  LogLimiter(uint64_t most, std::chrono::seconds interval) : most_(most), interval_(interval) {}

  void warn(const std::string& message);

 private:
  using Clock = std::chrono::steady_clock;

  const uint64_t most_;
  const std::chrono::seconds interval_;
  std::mutex mutex_;           // guards all below
  Clock::time_point until_{};  // of the interval that is under way
  uint64_t written_ = 0;
  uint64_t withheld_ = 0;
};

}  // namespace hbm::box
