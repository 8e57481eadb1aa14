#include "base/fork.h"

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm {
namespace {

std::atomic<uint64_t> generation{0};

void count_fork() noexcept { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  static const int failure = pthread_atfork(nullptr, nullptr, count_fork);
  if (failure != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot install a fork handler: ") + std::strerror(failure));
  }
  generation_ = generation.load(std::memory_order_relaxed);
}

bool ForkGuard::in_child() const noexcept {
  return generation_ != generation.load(std::memory_order_relaxed);
}

void ForkGuard::require_owner(const char* action) const {
  if (!in_child()) return;
  throw Error(ErrorKind::kUnavailable,
              std::string("a forked child cannot ") + action +
                  ": the memory belongs to the parent process; use ordinary memory in the child, "
                  "or start it by spawn instead of fork");
}

}  // namespace hbm
