// The segment allocator: tensors in this process' segments (memory/segment.h), where the other
// ranks of the node read them.
//
// Every tensor holds its segment, so tensors outlive groups; resize_() takes memory of the same
// segment. What a forked child inherits is shared with its parent: the child may read it, what it
// writes the parent sees, and freeing it does nothing.
//
// Threads: every function may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "memory/segment.h"

namespace hbm {

// An uninitialised, contiguous CPU tensor. Throws Error(kExhausted).
// REQUIRES: `segment` is to stay for good, like that of process_segment(). Likewise below.
at::Tensor tensor_in(const std::shared_ptr<memory::SharedSegment>& segment, at::IntArrayRef shape,
                     at::ScalarType type);

// PyTorch's interface to a segment (getMemAllocator).
std::shared_ptr<c10::Allocator> segment_allocator(
    const std::shared_ptr<memory::SharedSegment>& segment);

// Makes PyTorch's CPU allocator place what is at least kSegmentTensorBytes in the segment of
// `policy`, and leave the rest, and all of it in a forked child, to the allocator that it had.
// Idempotent. Throws Error(kUnavailable) if another library has put its own allocator in place.
void install_cpu_allocator(memory::Policy policy);

}  // namespace hbm
