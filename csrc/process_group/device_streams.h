// The streams of one accelerator on which a group copies between tensors and the host's memory.
// Uses PyTorch's device-neutral interfaces; nothing here depends on CUDA.
//
// One stream copies to the host and another to the device, so that the bus carries data in both
// directions at the same time. The caller's stream continues to compute during the copies. Copies
// and computation wait for each other only if PyTorch's pool has given the caller one of these two
// streams.
//
// Threads: every member may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "process_group/host_copy_memory.h"

namespace hbm::process_group {

class DeviceResult;

class DeviceStreams {
 public:
  // Takes two streams of `device` from PyTorch's pool. Large host copies are placed in `segment`,
  // the group's segment, if the device can pin memory there. Throws Error(kInvalid) if
  // HBMCOMM_DEVICE_CHUNK_BYTES is invalid.
  DeviceStreams(c10::Device device, const std::shared_ptr<memory::SharedSegment>& segment);

  c10::Device device() const noexcept { return device_; }
  c10::Stream to_host() const noexcept { return to_host_; }
  c10::Stream to_device() const noexcept { return to_device_; }
  // Returns the bytes of a chunk of a large operation: HBMCOMM_DEVICE_CHUNK_BYTES.
  size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  const c10::impl::VirtualGuardImpl& guard() const noexcept { return guard_; }

  // Throws Error(kUnsupported), naming `operation`, while the current stream records a graph.
  void require_no_capture(const char* operation) const;

  // Returns the calling thread's current stream of the device.
  c10::Stream current() const { return guard_.getStream(device_); }

  // Returns an event that `stream` reaches after all work queued on it so far.
  c10::Event record(const c10::Stream& stream) const;

  // Keeps the allocator from reusing the tensor's memory before `stream` is done with it.
  void keep_for(const at::Tensor& tensor, const c10::Stream& stream) const;

  // Returns a contiguous host copy for `tensor`: uninitialised, with the shape and type of
  // `tensor`. The memory is pinned memory in the segment, else PyTorch's pinned memory, else
  // pageable memory if the device has no pinned allocator. Throws Error(kExhausted) if the host has
  // no such memory left.
  at::Tensor host_copy(const at::Tensor& tensor) const;
  // Returns a flat tensor of `elements`, with the type of `like`, in the same kind of memory as
  // host_copy().
  at::Tensor host_tensor(int64_t elements, const at::TensorOptions& like) const;

  // Returns true if `copies` read a result that an earlier collective has not written yet. Also
  // records `result`, the result of the collective that makes the copies.
  bool is_result_read_by(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies,
                         std::shared_ptr<const DeviceResult> result);

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream to_host_;
  const c10::Stream to_device_;
  HostCopyMemory* const host_copies_;  // null: no host copies in the segment
  const bool pinned_;
  const size_t chunk_bytes_;

  std::mutex mutex_;                                             // guards unfinished_
  std::vector<std::shared_ptr<const DeviceResult>> unfinished_;  // results of collectives
};

}  // namespace hbm::process_group
