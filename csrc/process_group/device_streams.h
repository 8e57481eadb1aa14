// The streams of one accelerator on which a group copies between tensors and the host's memory, by
// PyTorch's device-neutral interfaces: nothing here knows CUDA.
//
// Copies to the host go on one stream and copies to the device on another, so that the bus carries
// both at once. Neither is the caller's stream, which goes on computing.
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

#include "process_group/twin_memory.h"

namespace hbm {

class DeviceResult;

class DeviceStreams {
 public:
  // Takes two streams of `device` from PyTorch's pool. Large twins lie in `segment`, the group's,
  // if the device can pin them there. Throws Error(kInvalid) if HBMCOMM_DEVICE_CHUNK_BYTES makes no
  // sense.
  DeviceStreams(c10::Device device, const std::shared_ptr<memory::SharedSegment>& segment);

  c10::Device device() const noexcept { return device_; }
  c10::Stream to_host() const noexcept { return to_host_; }
  c10::Stream to_device() const noexcept { return to_device_; }
  // The bytes of a chunk of a large operation: HBMCOMM_DEVICE_CHUNK_BYTES.
  size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  const c10::impl::VirtualGuardImpl& guard() const noexcept { return guard_; }

  // Throws Error(kUnsupported), naming `operation`, while the current stream records a graph.
  void require_no_capture(const char* operation) const;

  // Returns the calling thread's current stream of the device.
  c10::Stream current() const { return guard_.getStream(device_); }

  // Returns an event of what `stream` has been given so far.
  c10::Event record(const c10::Stream& stream) const;

  // Keeps the allocator from giving the tensor's memory to others before `stream` is done with it.
  void keep_for(const at::Tensor& tensor, const c10::Stream& stream) const;

  // A contiguous tensor on the host with the shape and type of `tensor`: in the segment, pinned; or
  // in pinned memory of PyTorch's; or in pageable memory where the device has no allocator for
  // that. Throws Error(kExhausted).
  at::Tensor host_twin(const at::Tensor& tensor) const;
  at::Tensor host_tensor(int64_t elements, const at::TensorOptions& like) const;

  // Whether `copies` read what a collective that was issued before has still to write. Takes note
  // of `result`, of the collective that makes them.
  bool is_result_read_by(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies,
                         std::shared_ptr<const DeviceResult> result);

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream to_host_;
  const c10::Stream to_device_;
  TwinMemory* const twins_;  // null: none in the segment
  const bool pinned_;
  const size_t chunk_bytes_;

  std::mutex mutex_;                                             // guards the member below
  std::vector<std::shared_ptr<const DeviceResult>> unfinished_;  // of collectives
};

}  // namespace hbm
