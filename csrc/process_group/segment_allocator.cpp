#include "process_group/segment_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "memory/segment.h"
#include "process_group/tuning.h"
#include "process_group/types.h"

namespace hbm::process_group {
namespace {

class SegmentAllocator final : public c10::Allocator {
 public:
  explicit SegmentAllocator(std::shared_ptr<memory::SharedSegment> segment)
      : segment_(std::move(segment)) {}

  // Allocates as allocate() does, but throws Error untranslated.
  c10::DataPtr take(size_t bytes) {
    auto block = std::make_unique<SegmentBlock>(SegmentBlock{segment_, nullptr});
    void* const data = segment_->allocate(bytes);
    block->data = data;
    return {data, block.release(), &release, c10::Device(c10::kCPU)};
  }

  c10::DataPtr allocate(size_t bytes) override {
    return translated([&] { return take(bytes); });
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct SegmentBlock {
    std::shared_ptr<memory::SharedSegment> segment;
    void* data;
  };

  static void release(void* context) {
    const std::unique_ptr<SegmentBlock> block(static_cast<SegmentBlock*>(context));
    block->segment->free(block->data);
  }

  const std::shared_ptr<memory::SharedSegment> segment_;
};

// Returns the allocator of a segment. PyTorch's storages keep a plain pointer to it, and tensors
// outlive groups. So the allocator and its segment are never destroyed. There is one allocator for
// each policy.
SegmentAllocator& allocator_of(const std::shared_ptr<memory::SharedSegment>& segment) {
  static std::mutex mutex;
  static auto& allocators =
      *new std::map<const memory::SharedSegment*, std::unique_ptr<SegmentAllocator>>;
  const std::lock_guard lock(mutex);
  auto& allocator = allocators[segment.get()];
  if (!allocator) allocator = std::make_unique<SegmentAllocator>(segment);
  return *allocator;
}

// Allocates large blocks in a segment, and other blocks by PyTorch's previous CPU allocator.
// raw_allocate() requires that the context of a DataPtr equals its address, so the context cannot
// name the segment. Instead the deleter asks the segment whether it contains the block. Segments of
// the process are never destroyed.
class CpuAllocator final : public c10::Allocator {
 public:
  CpuAllocator(std::shared_ptr<memory::SharedSegment> segment, c10::Allocator* previous)
      : segment_(std::move(segment)), previous_(previous) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSegmentTensorBytes || fork_.in_child()) return previous_->allocate(bytes);
    void* const block = translated([&] { return segment_->allocate(bytes); });
    return {block, block, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static CpuAllocator*& installed() {
    static CpuAllocator* allocator = nullptr;
    return allocator;
  }

 private:
  static void release(void* block) {
    const CpuAllocator& own = *installed();
    if (own.segment_->contains(block, 0)) {
      own.segment_->free(block);
    } else {
      own.previous_->raw_deleter()(block);
    }
  }

  const ForkGuard fork_;
  const std::shared_ptr<memory::SharedSegment> segment_;
  c10::Allocator* const previous_;
};

}  // namespace

at::Tensor tensor_in(const std::shared_ptr<memory::SharedSegment>& segment, at::IntArrayRef shape,
                     at::ScalarType type) {
  const size_t bytes = c10::multiply_integers(shape) * c10::elementSize(type);
  SegmentAllocator& allocator = allocator_of(segment);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       allocator.take(bytes), &allocator,
                                                       /*resizable=*/true);
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

std::shared_ptr<c10::Allocator> segment_allocator(
    const std::shared_ptr<memory::SharedSegment>& segment) {
  return {std::shared_ptr<void>(), &allocator_of(segment)};
}

void install_cpu_allocator(memory::Policy policy) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  CpuAllocator*& installed = CpuAllocator::installed();
  if (installed != nullptr) return;
  c10::Allocator* const before = c10::GetCPUAllocator();
  if (before->raw_deleter() == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                "HBMCOMM_ALLOCATOR=segment: PyTorch's CPU allocator was replaced by one that "
                "cannot be built upon; unset HBMCOMM_ALLOCATOR, or do not replace it");
  }
  installed = new CpuAllocator(memory::process_segment(policy), before);
  c10::SetCPUAllocator(installed);
  if (c10::GetCPUAllocator() == installed) return;
  throw Error(ErrorKind::kUnavailable,
              "HBMCOMM_ALLOCATOR=segment: another library has put its own CPU allocator in place, "
              "at a higher priority; unset one of the two");
}

}  // namespace hbm::process_group
