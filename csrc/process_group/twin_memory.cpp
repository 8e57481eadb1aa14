#include "process_group/twin_memory.h"

#include <ATen/ops/from_blob.h>

#include <bit>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "process_group/tuning.h"

namespace hbm {
namespace {

// Four sizes to each power of two, so that a block serves twins of about its size.
size_t block_bytes(size_t bytes) {
  const size_t step = std::bit_ceil(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

}  // namespace

TwinMemory* TwinMemory::of(const std::shared_ptr<memory::SharedSegment>& segment,
                           c10::DeviceType type) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<const memory::SharedSegment*, c10::DeviceType>,
                                   std::unique_ptr<TwinMemory>>;
  const HostRegistration* const registration = HostRegistration::of(type);
  if (registration == nullptr) return nullptr;
  const std::lock_guard lock(mutex);
  auto& own = all[{segment.get(), type}];
  if (!own) own.reset(new TwinMemory(segment, *registration));
  return own.get();
}

at::Tensor TwinMemory::take(int64_t elements, at::ScalarType type) {
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  if (bytes < kPinnedHostCopyBytes) return {};
  Block block = take_kept(bytes);
  if (block.data == nullptr) block = make(block_bytes(bytes));
  if (block.data == nullptr) {
    give_back_kept();
    block = make(block_bytes(bytes));
  }
  if (block.data == nullptr) return {};
  return at::from_blob(
      block.data, {elements}, [this, block](void*) { keep(block); }, at::TensorOptions(type));
}

TwinMemory::Block TwinMemory::take_kept(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto place = kept_.lower_bound(bytes);
  if (place == kept_.end() || place->first > 2 * bytes) return {};
  const Block block{place->second, place->first};
  kept_.erase(place);
  return block;
}

TwinMemory::Block TwinMemory::make(size_t bytes) {
  void* data = nullptr;
  try {
    data = segment_->allocate(bytes);
  } catch (const Error& error) {
    log::info(std::string("copies of an accelerator's tensors lie outside of the segment: ") +
              error.what());
    return {};
  }
  if (registration_.add(data, bytes)) return {data, bytes};
  segment_->free(data);
  return {};
}

// Unpins before it frees: the device writes to the pages that it has pinned, not to the address.
void TwinMemory::give_back_kept() {
  const std::lock_guard lock(mutex_);
  for (const auto& [bytes, data] : kept_) {
    registration_.remove(data);
    segment_->free(data);
  }
  kept_.clear();
}

void TwinMemory::keep(const Block& block) {
  const std::lock_guard lock(mutex_);
  kept_.emplace(block.bytes, block.data);
}

}  // namespace hbm
