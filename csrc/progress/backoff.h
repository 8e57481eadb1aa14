// How a polling loop waits: a short spin, then yields, then sleeps that grow to a millisecond.
#pragma once

#include <cstdint>

namespace hbm {

class Backoff {
 public:
  // `crowded`: more runnable ranks than cores, so spinning only keeps the peer from its turn.
  explicit Backoff(bool crowded) noexcept : crowded_(crowded) {}

  void reset() noexcept { idle_polls_ = 0; }
  void pause() noexcept;

 private:
  bool crowded_;
  uint32_t idle_polls_ = 0;
};

}  // namespace hbm
