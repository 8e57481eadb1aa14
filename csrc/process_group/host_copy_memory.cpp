#include "process_group/host_copy_memory.h"

#include <ATen/ops/from_blob.h>

#include <bit>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

// Rounds up to one of four sizes between two powers of two, so that a cached block fits more host
// copies.
size_t block_bytes(size_t bytes) {
  const size_t step = std::bit_ceil(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

}  // namespace

HostCopyMemory* HostCopyMemory::of(const std::shared_ptr<memory::SharedSegment>& segment,
                                   c10::DeviceType type) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<const memory::SharedSegment*, c10::DeviceType>,
                                   std::unique_ptr<HostCopyMemory>>;
  const HostRegistration* const registration = HostRegistration::of(type);
  if (registration == nullptr) return nullptr;
  const std::lock_guard lock(mutex);
  auto& own = all[{segment.get(), type}];
  if (!own) own.reset(new HostCopyMemory(segment, *registration));
  return own.get();
}

at::Tensor HostCopyMemory::take(int64_t elements, at::ScalarType type) {
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  if (bytes < kPinnedHostCopyBytes) return {};
  Block block = take_cached(bytes);
  if (block.data == nullptr) block = make(block_bytes(bytes));
  if (block.data == nullptr) {
    release_cached();
    block = make(block_bytes(bytes));
  }
  if (block.data == nullptr) return {};
  return at::from_blob(
      block.data, {elements}, [this, block](void*) { cache(block); }, at::TensorOptions(type));
}

HostCopyMemory::Block HostCopyMemory::take_cached(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = cached_.lower_bound(bytes);
  if (found == cached_.end() || found->first > 2 * bytes) return {};
  const Block block{found->second, found->first};
  cached_.erase(found);
  return block;
}

HostCopyMemory::Block HostCopyMemory::make(size_t bytes) {
  void* data = nullptr;
  try {
    data = segment_->allocate(bytes);
  } catch (const Error& error) {
    log::info(std::string("copies of an accelerator's tensors are outside of the segment: ") +
              error.what());
    return {};
  }
  if (registration_.add(data, bytes)) return {data, bytes};
  segment_->free(data);
  return {};
}

// Unpins each block before freeing it. free() may give the pages back to the kernel, and a later
// block at this address then has other pages. If the old pages were still pinned, the device would
// copy to them.
void HostCopyMemory::release_cached() {
  const std::lock_guard lock(mutex_);
  for (const auto& [bytes, data] : cached_) {
    registration_.remove(data);
    segment_->free(data);
  }
  cached_.clear();
}

void HostCopyMemory::cache(const Block& block) {
  const std::lock_guard lock(mutex_);
  cached_.emplace(block.bytes, block.data);
}

}  // namespace hbm::process_group
