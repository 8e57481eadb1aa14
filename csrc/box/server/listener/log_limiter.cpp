#include "box/server/listener/log_limiter.h"

#include <utility>

#include "base/log.h"

namespace hbm::box {

void LogLimiter::warn(const std::string& message) {
  uint64_t withheld = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (now >= until_) {
      until_ = now + interval_;
      written_ = 0;
      withheld = std::exchange(withheld_, 0);
    }
    if (written_ == most_) {
      ++withheld_;
      return;
    }
    ++written_;
  }
  log::warn(withheld == 0 ? message
                          : message + " (and " + std::to_string(withheld) +
                                " more warnings of this sort were left out)");
}

}  // namespace hbm::box
