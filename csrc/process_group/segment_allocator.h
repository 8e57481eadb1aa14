// The segment allocator places tensors in this process' segments (memory/segment.h), where the
// other ranks of the node can read them.
//
// Every tensor holds its segment, so tensors may outlive groups. resize_() takes memory of the same
// segment. A forked child shares its inherited tensors with the parent. The child may read them;
// its writes are visible to the parent; freeing them does nothing.
//
// Threads: every function may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "memory/segment.h"

namespace hbm::process_group {

// Returns an uninitialised, contiguous CPU tensor. Throws as SharedSegment::allocate(). REQUIRES,
// also for segment_allocator(): `segment` is never destroyed. Segments from process_segment() never
// are.
at::Tensor tensor_in(const std::shared_ptr<memory::SharedSegment>& segment, at::IntArrayRef shape,
                     at::ScalarType type);

// Returns PyTorch's interface to a segment (getMemAllocator).
std::shared_ptr<c10::Allocator> segment_allocator(
    const std::shared_ptr<memory::SharedSegment>& segment);

// Makes PyTorch's CPU allocator place blocks of at least kSegmentTensorBytes in the segment of
// `policy`. The previous allocator handles other blocks, and all blocks in a forked child.
// Idempotent. Throws Error(kUnavailable) if another library has replaced the allocator, and as
// memory::process_segment().
void install_cpu_allocator(memory::Policy policy);

}  // namespace hbm::process_group
