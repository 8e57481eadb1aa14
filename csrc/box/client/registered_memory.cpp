#include "box/client/registered_memory.h"

#include "base/error.h"
#include "base/log.h"

namespace hbm::box::client {

class RegisteredMemory::Registration {
 public:
  Registration(std::byte* memory, uint64_t bytes) : memory_(memory), bytes_(bytes) {}

  void register_with(transport::Transport& transport) {
    const std::lock_guard lock(mutex_);
    if (ended_ || registered_) return;
    registered_ = true;
    try {
      handle_ = transport.register_memory(memory_, bytes_);
    } catch (const Error& error) {
      log::warn(std::string("transfers of a segment's buffer are copied: ") + error.what());
    }
  }

  void renew() {
    const std::lock_guard lock(mutex_);
    handle_.reset();
    registered_ = false;
  }

  // After this call, no transport begins to use the memory.
  void end() {
    const std::lock_guard lock(mutex_);
    handle_.reset();
    ended_ = true;
  }

 private:
  std::byte* const memory_;
  const uint64_t bytes_;
  std::mutex mutex_;  // guards all below
  std::shared_ptr<void> handle_;
  bool registered_ = false;
  bool ended_ = false;
};

std::shared_ptr<void> RegisteredMemory::add(std::byte* memory, uint64_t bytes) {
  auto registration = std::make_shared<Registration>(memory, bytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& each) { return each.expired(); });
  all_.push_back(registration);
  stale_.store(true, std::memory_order_release);  // pairs with register_with()
  // The engine may still hold the registration when its owner destroys this pointer, so the
  // pointer's deleter ends the registration.
  return {registration.get(), [registration](void*) { registration->end(); }};
}

void RegisteredMemory::register_with(transport::Transport& transport) {
  if (!stale_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  stale_.store(false, std::memory_order_relaxed);
  for (const auto& each : all_) {
    if (const auto registration = each.lock()) registration->register_with(transport);
  }
}

void RegisteredMemory::renew() {
  const std::lock_guard lock(mutex_);
  for (const auto& each : all_) {
    if (const auto registration = each.lock()) registration->renew();
  }
  stale_.store(true, std::memory_order_release);  // pairs with register_with()
}

}  // namespace hbm::box::client
