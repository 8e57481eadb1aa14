// A sparse COO tensor of an accelerator and its twin on the host, for an allreduce.
//
// What a sparse tensor holds is two dense ones, indices and values, which are copied as they are:
// the host coalesces, so the device needs no operator for sparse tensors. Their lengths are the
// host's to know, and may change with every operation on the tensor. So they are looked up when the
// operation begins, behind those issued before it, and the sum gets memory of its own at the end,
// as on the CPU.
//
// Threads: made by the issuing thread; the rest is for the one that drives the operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "process_group/device_transfer.h"

namespace hbm {

class SparseTwin {
 public:
  // The sum may be used by the calling thread's current stream, and by others that wait for the
  // result.
  SparseTwin(at::Tensor tensor, std::shared_ptr<DeviceStreams> streams);

  // Takes host memory for what the tensor holds now. Returns the copies into it.
  Copies to_host();

  // Returns the tensor on the host, coalesced. REQUIRES: the copies of to_host() have arrived.
  at::Tensor coalesced() const;

  // Takes the sum, a coalesced tensor on the host.
  void set_sum(at::Tensor sum) { sum_ = std::move(sum); }

  // Gives the tensor memory of the sum's size. Returns the copies into it. REQUIRES: set_sum().
  Copies to_device();

 private:
  const at::Tensor tensor_;
  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream caller_;
  at::Tensor indices_;  // int64 [sparse dimensions, elements], on the host
  at::Tensor values_;   // [elements, dense dimensions...]
  at::Tensor sum_;
};

}  // namespace hbm
