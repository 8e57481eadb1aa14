// A pool of registered buffers of one size, for messages and for transfers of memory that is not
// registered; the sizes of the messages that both ends agree on; and what tells completions apart.
//
// Threads: take() and give() one at a time; all else any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"
#include "box/verbs/common/domain.h"

namespace hbm::verbs {

inline constexpr uint32_t kRequestBytes = 512;  // of a buffer for one request
inline constexpr uint32_t kReplyBytes = 4096;   // of a buffer for a reply, or for a part of it
static_assert(sizeof(smb::Header) + smb::kMaxBody + sizeof(smb::Tag) <= kRequestBytes);

// The upper byte of a work request's wr_id; below, it is a lane's number (client) or a kind (box).
inline constexpr int kTagShift = 56;
inline constexpr uint64_t kReceiveTag = 0xff;
inline constexpr uint64_t kReplyTag = 1;  // below: the slot of a long one, or kNoSlot
inline constexpr uint64_t kBindTag = 2;
inline constexpr uint32_t kNoSlot = UINT32_MAX;

class BufferPool {
 public:
  // Throws as MemoryRegion, and Error(kExhausted).
  BufferPool(std::shared_ptr<Domain> domain, uint32_t count, uint32_t slot_bytes);

  uint32_t count() const noexcept { return count_; }
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
