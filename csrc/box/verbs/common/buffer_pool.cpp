#include "box/verbs/common/buffer_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <numeric>

#include "base/error.h"

namespace hbm::box::verbs::common {

BufferPool::BufferPool(std::shared_ptr<Domain> domain, uint32_t count, uint32_t buffer_bytes)
    : count_(count), buffer_bytes_(buffer_bytes), free_(count) {
  const size_t bytes = size_t{count} * buffer_bytes;
  // MAP_SHARED, so that after a fork the device and this process still use the same pages.
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
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

}  // namespace hbm::box::verbs::common
