#include "process_group/python_lock.h"

#include <atomic>

namespace hbm::process_group {
namespace {

// Release in set_unlocked_call() pairs with acquire in without_python_lock().
std::atomic<UnlockedCall> installed_unlocked_call{nullptr};

}  // namespace

void without_python_lock(const std::function<void()>& call) {
  const UnlockedCall unlocked = installed_unlocked_call.load(std::memory_order_acquire);
  unlocked != nullptr ? unlocked(call) : call();
}

void set_unlocked_call(UnlockedCall unlocked) noexcept {
  installed_unlocked_call.store(unlocked, std::memory_order_release);
}

}  // namespace hbm::process_group
