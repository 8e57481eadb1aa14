// Registered memory in slots of one size, for messages and bounce buffers.
//
// Threads: take() and give() one at a time; all else any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "box/verbs/common/domain.h"

namespace hbm::verbs {

class Slots {
 public:
  // Throws as MemoryRegion, and Error(kExhausted).
  Slots(std::shared_ptr<Domain> domain, uint32_t count, uint32_t slot_bytes);

  uint32_t count() const noexcept { return count_; }
  uint32_t slot_bytes() const noexcept { return slot_bytes_; }
  std::byte* at(uint32_t slot) const noexcept { return memory_.get() + size_t{slot} * slot_bytes_; }
  // The first `bytes` of a slot, for a work request.
  ibv_sge entry(uint32_t slot, uint32_t bytes) const noexcept {
    return {reinterpret_cast<uintptr_t>(at(slot)), bytes, region_->lkey()};
  }

  // A slot that nobody has, or none.
  std::optional<uint32_t> take();
  void give(uint32_t slot) { free_.push_back(slot); }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* memory) const noexcept;
  };

  const uint32_t count_;
  const uint32_t slot_bytes_;
  std::unique_ptr<std::byte, Unmap> memory_;
  std::optional<MemoryRegion> region_;
  std::vector<uint32_t> free_;
};

}  // namespace hbm::verbs
