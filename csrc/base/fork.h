// Detects objects that this process has inherited by a fork (ForkGuard), and provides objects of
// which each process has its own (per_process()).
//
// Memory that memkind or a shared segment allocated before a fork still belongs to the parent, so a
// child must not allocate or free there. An object that owns such memory holds a ForkGuard and
// checks it before it takes any lock. Otherwise the child could wait forever for a lock that
// another thread of the parent held at the fork.
//
// Threads: everything may be called from any thread; a check of a ForkGuard costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace hbm {

class ForkGuard {
 public:
  // Throws Error(kUnavailable) if the fork handler cannot be installed (out of memory).
  ForkGuard();

  // Returns true in every process forked, directly or not, from the process that made this object.
  bool in_child() const noexcept;

  // Throws Error(kUnavailable) in a child; `action` completes "a forked child cannot ...".
  void require_owner(const char* action) const;

 private:
  uint64_t generation_;
};

// Returns this process' T. A forked child gets a new one. A plain static would be inherited, with
// the parent's contents and perhaps a mutex that is never unlocked. The object is never destroyed.
// All calls with the same T return the same object, so give each object a type of its own.
template <typename T>
T& per_process() {
  struct Owned {
    explicit Owned(Owned* of_parent) : inherited(of_parent) {}
    const ForkGuard fork;
    Owned* const inherited;  // keeps the parent's object reachable, for leak checkers
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
