// allreduce of sparse COO tensors: every rank gets every rank's indices and values, and adds them
// up in rank order.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "communicator/communicator.h"

namespace hbm {

// One sparse COO CPU tensor, and SUM. Throws Error(kInvalid) or Error(kUnsupported).
void check_sparse(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

// `tensor` becomes the coalesced sum. Ranks may have different numbers of indices.
OperationPtr make_sparse_allreduce(std::shared_ptr<Communicator> communicator, int ranks,
                                   uint64_t sequence, const at::Tensor& tensor);

}  // namespace hbm
