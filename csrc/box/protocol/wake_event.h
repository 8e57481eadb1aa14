// An event that ends another thread's sleep in poll().
//
// Threads: any may signal; one sleeps on fd() and clears it. A signal before the sleep ends that
// sleep.
#pragma once

#include "base/descriptor.h"

namespace hbm::smb {

class WakeEvent {
 public:
  // Throws Error(kUnavailable) when the kernel gives no eventfd.
  WakeEvent();

  int fd() const noexcept { return fd_.get(); }  // readable once signalled
  void signal() noexcept;
  void clear() noexcept;

 private:
  const Descriptor fd_;
};

}  // namespace hbm::smb
