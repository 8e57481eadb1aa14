// An event that ends another thread's sleep in poll().
//
// Threads: any may signal; one thread polls fd() and clears it. A signal that comes before the
// sleep also ends it.
#pragma once

#include "base/descriptor.h"

namespace hbm::box::protocol {

class WakeEvent {
 public:
  // Throws Error(kUnavailable) if the kernel provides no eventfd.
  WakeEvent();

  int fd() const noexcept { return fd_.get(); }  // readable once signalled
  void signal() noexcept;
  void clear() noexcept;

 private:
  const Descriptor fd_;
};

}  // namespace hbm::box::protocol
