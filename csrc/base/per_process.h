// An object of which each process has its own: a forked child gets a new one, where a plain static
// would be its parent's, with the parent's contents and perhaps a mutex that nobody will unlock.
//
// Threads: may be called from any thread. The objects are never destroyed.
#pragma once

#include <atomic>
#include <memory>

#include "base/fork.h"

namespace hbm {

// One T for each process. REQUIRES: T is named once in the whole program, so give it a type of its
// own.
template <typename T>
T& per_process() {
  struct Owned {
    explicit Owned(Owned* of_parent) : inherited(of_parent) {}
    const ForkGuard fork;
    Owned* const inherited;  // keeps what the parent made reachable, for leak checkers
    T value;
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->fork.in_child()) {
    auto fresh = std::make_unique<Owned>(found);
    if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
      return fresh.release()->value;
    }
  }
  return found->value;
}

}  // namespace hbm
