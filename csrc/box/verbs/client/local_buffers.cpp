#include "box/verbs/client/local_buffers.h"

#include <cstring>

#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::client {
namespace {

uintptr_t address(const std::byte* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

std::shared_ptr<common::MemoryRegion> LocalBuffers::register_memory(std::byte* memory,
                                                                    uint64_t bytes) {
  auto region =
      std::make_shared<common::MemoryRegion>(domain_, memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  std::erase_if(regions_, [](const auto& entry) { return entry.second.expired(); });
  regions_[address(memory)] = region;
  return region;
}

std::shared_ptr<common::MemoryRegion> LocalBuffers::registered(const std::byte* memory,
                                                               uint64_t bytes) {
  auto after = regions_.upper_bound(address(memory));
  if (after == regions_.begin()) return nullptr;
  const auto& [start, held] = *--after;
  const auto region = held.lock();
  const bool covers = region != nullptr && address(memory) + bytes <= start + region->get()->length;
  return covers ? region : nullptr;
}

std::optional<LocalBuffers::SliceBuffer> LocalBuffers::buffer_for(const transport::Slice& slice,
                                                                  uint32_t inline_bytes) {
  const uint32_t bytes = slice.transfer.bytes;
  const bool writes = slice.opcode == protocol::Opcode::kWrite;
  SliceBuffer buffer;
  buffer.uses.slice = slice;
  buffer.entry = {address(slice.local), bytes, 0};
  if (writes && bytes <= inline_bytes) {
    buffer.is_inline = true;
    return buffer;
  }
  if (auto region = registered(slice.local, bytes)) {
    buffer.entry.lkey = region->lkey();
    buffer.uses.region = std::move(region);
    return buffer;
  }
  if (!buffers_) buffers_.emplace(domain_, common::kSliceBuffers, transport::kSliceBytes);
  buffer.uses.buffer = buffers_->take();
  if (!buffer.uses.buffer) return std::nullopt;
  buffer.entry = buffers_->entry(*buffer.uses.buffer, bytes);
  if (writes) std::memcpy(buffers_->at(*buffer.uses.buffer), slice.local, bytes);
  return buffer;
}

void LocalBuffers::done(const Posted& posted, bool arrived) {
  if (!posted.buffer) return;
  const transport::Slice& slice = *posted.slice;
  if (arrived && slice.opcode == protocol::Opcode::kRead) {
    std::memcpy(slice.local, buffers_->at(*posted.buffer), slice.transfer.bytes);
  }
  buffers_->give(*posted.buffer);
}

}  // namespace hbm::box::verbs::client
