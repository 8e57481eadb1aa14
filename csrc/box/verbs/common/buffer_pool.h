// A pool of registered buffers of one size, for messages and for transfers of unregistered memory;
// the message sizes of both ends; and the tags of completions.
//
// Threads: one at a time may call take() and give(). Any may call the other members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"
#include "box/verbs/common/domain.h"

namespace hbm::box::verbs::common {

inline constexpr uint32_t kRequestBytes = 512;  // buffer for one request
inline constexpr uint32_t kReplyBytes = 4096;   // buffer for a reply, or for part of one
static_assert(sizeof(protocol::Header) + protocol::kMaxBody + sizeof(protocol::Tag) <=
              kRequestBytes);

// The tag of a completion: the upper byte of wr_id. A client uses the index of the queue pair, or
// kReceiveTag; a box uses the kind of the work request.
inline constexpr int kTagShift = 56;
inline constexpr uint64_t kReceiveTag = 0xff;
inline constexpr uint64_t kReplyTag = 1;  // lower bytes: the buffer of a long reply, or kNoBuffer
inline constexpr uint64_t kBindTag = 2;
inline constexpr uint32_t kNoBuffer = UINT32_MAX;

class BufferPool {
 public:
  // Throws the errors of MemoryRegion, and Error(kExhausted) if memory is short.
  BufferPool(std::shared_ptr<Domain> domain, uint32_t count, uint32_t buffer_bytes);

  uint32_t count() const noexcept { return count_; }
  std::byte* at(uint32_t buffer) const noexcept {
    return memory_.get() + size_t{buffer} * buffer_bytes_;
  }
  // Returns the first `bytes` of a buffer, for a work request.
  ibv_sge entry(uint32_t buffer, uint32_t bytes) const noexcept {
    return {reinterpret_cast<uintptr_t>(at(buffer)), bytes, region_->lkey()};
  }

  // Returns a free buffer, or none.
  std::optional<uint32_t> take();
  void give(uint32_t buffer) { free_.push_back(buffer); }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* memory) const noexcept;
  };

  const uint32_t count_;
  const uint32_t buffer_bytes_;
  std::unique_ptr<std::byte, Unmap> memory_;
  std::optional<MemoryRegion> region_;
  std::vector<uint32_t> free_;
};

}  // namespace hbm::box::verbs::common
