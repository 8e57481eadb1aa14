#include "box/protocol/elements.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace hbm::smb {
namespace {

constexpr uint64_t kElement = sizeof(uint64_t);

// A lock would write, and shared memory may be mapped for reading only.
static_assert(std::atomic_ref<uint8_t>::is_always_lock_free &&
              std::atomic_ref<uint16_t>::is_always_lock_free &&
              std::atomic_ref<uint32_t>::is_always_lock_free &&
              std::atomic_ref<uint64_t>::is_always_lock_free);

struct LoadElement {
  template <typename T>
  static void one(std::byte* own, const std::byte* shared) noexcept {
    T& element = *reinterpret_cast<T*>(const_cast<std::byte*>(shared));
    const T value = std::atomic_ref<T>(element).load(std::memory_order_relaxed);
    std::memcpy(own, &value, sizeof(T));
  }
};

struct StoreElement {
  template <typename T>
  static void one(const std::byte* own, std::byte* shared) noexcept {
    T value;
    std::memcpy(&value, own, sizeof(T));
    std::atomic_ref<T>(*reinterpret_cast<T*>(shared)).store(value, std::memory_order_relaxed);
  }
};

template <typename Copy, typename Own, typename Shared>
class Walk {
 public:
  Walk(Own* own, Shared* shared, uint64_t bytes) noexcept
      : own_(own), shared_(shared), left_(bytes) {}

  void run() noexcept {
    align_past<uint8_t>();
    align_past<uint16_t>();
    align_past<uint32_t>();
    while (left_ >= kElement) step<uint64_t>();
    if (left_ >= sizeof(uint32_t)) step<uint32_t>();
    if (left_ >= sizeof(uint16_t)) step<uint16_t>();
    if (left_ > 0) step<uint8_t>();
  }

 private:
  // Aligns the shared address to a multiple of twice the size of T.
  template <typename T>
  void align_past() noexcept {
    if ((reinterpret_cast<uintptr_t>(shared_) & sizeof(T)) != 0 && left_ >= sizeof(T)) step<T>();
  }

  template <typename T>
  void step() noexcept {
    Copy::template one<T>(own_, shared_);
    own_ += sizeof(T);
    shared_ += sizeof(T);
    left_ -= sizeof(T);
  }

  Own* own_;
  Shared* shared_;
  uint64_t left_;
};

}  // namespace

void load_elements(std::byte* own, const std::byte* shared, uint64_t bytes) noexcept {
  Walk<LoadElement, std::byte, const std::byte>(own, shared, bytes).run();
}

void store_elements(std::byte* shared, const std::byte* own, uint64_t bytes) noexcept {
  Walk<StoreElement, const std::byte, std::byte>(own, shared, bytes).run();
}

uint64_t uncut_bytes(const std::byte* shared, uint64_t bytes, uint64_t all) noexcept {
  if (bytes >= all) return all;
  return bytes - std::min(bytes, (reinterpret_cast<uintptr_t>(shared) + bytes) % kElement);
}

}  // namespace hbm::smb
