#include "box/verbs/common/buffer_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <numeric>

#include "base/error.h"

namespace hbm::verbs {

BufferPool::BufferPool(std::shared_ptr<Domain> domain, uint32_t count, uint32_t slot_bytes)
    : count_(count), slot_bytes_(slot_bytes), free_(count) {
  const size_t bytes = size_t{count} * slot_bytes;
  // Shared, so that a fork leaves the device and this process with the same pages.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kExhausted,
                refused("map " + std::to_string(bytes) + " B for messages", errno));
  }
  memory_ = {static_cast<std::byte*>(memory), Unmap{bytes}};
  region_.emplace(std::move(domain), memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  std::iota(free_.rbegin(), free_.rend(), 0u);
}

void BufferPool::Unmap::operator()(std::byte* memory) const noexcept { munmap(memory, bytes); }

std::optional<uint32_t> BufferPool::take() {
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

}  // namespace hbm::verbs
