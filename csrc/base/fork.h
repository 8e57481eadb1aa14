// Objects and forks: whether an object was made before a fork that led to this process, and objects
// of which each process has its own.
//
// Memory that memkind or a shared segment handed out before a fork still belongs to the parent, so
// a child must neither allocate nor free there. An object that owns such memory holds a ForkGuard
// and asks it first, before it takes any lock: another thread of the parent may have held the lock
// when the fork happened, and the child would wait for ever.
//
// Threads: everything may be called from any thread; to ask a ForkGuard costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace hbm {

class ForkGuard {
 public:
  // Throws Error(kUnavailable) when the fork handler cannot be installed (out of memory).
  ForkGuard();

  // True in every process forked, directly or not, from the one that made this object.
  bool in_child() const noexcept;

  // Throws Error(kUnavailable) in a child; `action` completes "a forked child cannot ...".
  void require_owner(const char* action) const;

 private:
  uint64_t generation_;
};

// One T for each process: a forked child gets a new one, where a plain static would be its
// parent's, with the parent's contents and perhaps a mutex that nobody will unlock. It is never
// destroyed. REQUIRES: T is named once in the whole program, so give it a type of its own.
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
