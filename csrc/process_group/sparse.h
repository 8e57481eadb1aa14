// The allreduce of sparse COO tensors. Every rank gathers the indices and values of all ranks, and
// adds them up in rank order, on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "communicator/communicator.h"

namespace hbm::process_group {

// Requires one sparse COO tensor, on the CPU or an accelerator, and SUM. Throws Error(kInvalid) or
// Error(kUnsupported).
void check_sparse(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

// Makes the operation. It calls `own` at the beginning for this rank's coalesced tensor on the
// host, and `take` at the end with the coalesced sum. Ranks may have different numbers of indices.
// The operation fails with Error(kMismatch) if the ranks' tensors differ in shape or in the number
// of sparse dimensions.
communicator::OperationPtr make_sparse_allreduce(
    std::shared_ptr<communicator::Communicator> communicator, int ranks, uint64_t sequence,
    std::function<at::Tensor()> own, std::function<void(const at::Tensor& sum)> take);

}  // namespace hbm::process_group
