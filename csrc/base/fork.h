// Tells an object whether it was made before a fork that led to this process.
//
// Memory that memkind or a shared segment handed out before a fork still belongs to the parent, so
// a child must neither allocate nor free there. An object that owns such memory holds a ForkGuard
// and asks it first, before it takes any lock: another thread of the parent may have held the lock
// when the fork happened, and the child would wait for ever.
//
// Threads: every member may be called from any thread; the question costs one relaxed load.
#pragma once

#include <cstdint>

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

}  // namespace hbm
