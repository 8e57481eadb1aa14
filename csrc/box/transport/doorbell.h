// Ends a sleep in poll() from another thread.
//
// Threads: any may ring; one sleeps on fd() and clears it. A ring before the sleep ends that sleep.
#pragma once

#include "base/descriptor.h"

namespace hbm::transport {

class Doorbell {
 public:
  // Throws Error(kUnavailable) when the kernel gives no eventfd.
  Doorbell();

  int fd() const noexcept { return fd_.get(); }  // readable once rung
  void ring() noexcept;
  void clear() noexcept;

 private:
  const Descriptor fd_;
};

}  // namespace hbm::transport
