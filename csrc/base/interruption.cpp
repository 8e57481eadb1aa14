#include "base/interruption.h"

#include <unistd.h>

#include <atomic>

namespace hbm {
namespace {

// Release in set_interruption_check() pairs with acquire in interruption().
std::atomic<InterruptionCheck> installed{nullptr};

}  // namespace

void set_interruption_check(InterruptionCheck check) noexcept {
  installed.store(check, std::memory_order_release);
}

std::exception_ptr interruption() noexcept {
  const InterruptionCheck check = installed.load(std::memory_order_acquire);
  return check != nullptr && gettid() == getpid() ? check() : nullptr;
}

}  // namespace hbm
