// A sparse COO tensor of an accelerator and its host copy, for an allreduce.
//
// A sparse tensor consists of two dense tensors, indices and values, which are copied unchanged.
// The host coalesces the tensor, so the device needs no operator for sparse tensors. Every
// operation on the sparse tensor may change the lengths of the two dense tensors. The host knows
// these lengths, and reads them when the allreduce begins, after earlier operations. The sum gets
// new memory at the end, as on the CPU.
//
// Threads: the issuing thread makes the object; the progress thread calls the members.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "process_group/device_transfer.h"

namespace hbm::process_group {

class SparseHostCopy {
 public:
  // The calling thread's current stream may use the sum, and so may streams that wait for the
  // result.
  SparseHostCopy(at::Tensor tensor, std::shared_ptr<DeviceStreams> streams);

  // Allocates host memory for the tensor's current contents. Returns the copies into it.
  Copies to_host();

  // Returns the tensor on the host, coalesced. REQUIRES: the copies of to_host() have arrived.
  at::Tensor coalesced() const;

  // Sets the sum, a coalesced tensor on the host.
  void set_sum(at::Tensor sum) { sum_ = std::move(sum); }

  // Gives the tensor new memory on the device, of the sum's size. Returns the copies into it.
  // REQUIRES: set_sum() was called.
  Copies to_device();

 private:
  const at::Tensor tensor_;
  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream caller_;
  at::Tensor indices_;  // int64 [sparse dimensions, elements], on the host
  at::Tensor values_;   // [elements, dense dimensions...]
  at::Tensor sum_;
};

}  // namespace hbm::process_group
