#include "box/client/registered_memory.h"

#include "base/error.h"
#include "base/log.h"

namespace hbm::client {

class RegisteredMemory::Adoption {
 public:
  Adoption(std::byte* memory, uint64_t bytes) : memory_(memory), bytes_(bytes) {}

  void bring_to(transport::Transport& link) {
    const std::lock_guard lock(mutex_);
    if (ended_ || told_) return;
    told_ = true;
    try {
      on_link_ = link.adopt(memory_, bytes_);
    } catch (const Error& error) {
      log::warn(std::string("transfers of a segment's buffer are copied: ") + error.what());
    }
  }

  void renew() {
    const std::lock_guard lock(mutex_);
    on_link_.reset();
    told_ = false;
  }

  // On return no link uses the memory for anything new.
  void end() {
    const std::lock_guard lock(mutex_);
    on_link_.reset();
    ended_ = true;
  }

 private:
  std::byte* const memory_;
  const uint64_t bytes_;
  std::mutex mutex_;  // guards all below
  std::shared_ptr<void> on_link_;
  bool told_ = false;
  bool ended_ = false;
};

std::shared_ptr<void> RegisteredMemory::add(std::byte* memory, uint64_t bytes) {
  auto adoption = std::make_shared<Adoption>(memory, bytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& each) { return each.expired(); });
  all_.push_back(adoption);
  stale_.store(true, std::memory_order_release);  // pairs with bring_to()
  // The driver may hold the adoption for a moment longer than its owner.
  return {adoption.get(), [adoption](void*) { adoption->end(); }};
}

void RegisteredMemory::bring_to(transport::Transport& link) {
  if (!stale_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  stale_.store(false, std::memory_order_relaxed);
  for (const auto& each : all_) {
    if (const auto adoption = each.lock()) adoption->bring_to(link);
  }
}

void RegisteredMemory::renew() {
  const std::lock_guard lock(mutex_);
  for (const auto& each : all_) {
    if (const auto adoption = each.lock()) adoption->renew();
  }
  stale_.store(true, std::memory_order_release);  // pairs with bring_to()
}

}  // namespace hbm::client
