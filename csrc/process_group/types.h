// The border between c10d's vocabulary and ours: types, operators and errors.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.h"

namespace hbm {

// Throws Error(kUnsupported) for a type that has no bytes to move.
Dtype to_dtype(at::ScalarType type);

// Throws Error(kUnsupported) when `op` has no meaning for `dtype`.
ReduceOp to_reduce_op(const c10d::ReduceOp& op, Dtype dtype);

// The factor of a PREMUL_SUM.
double premul_factor(const c10d::ReduceOp& op);

// Turns one of our errors into PyTorch's: ValueError, DistBackendError, DistNetworkError or
// OutOfMemoryError. Returns any other exception as it is.
std::exception_ptr to_torch(const std::exception_ptr& error);

// Runs `call`, translating what it throws.
template <typename Call>
auto translated(Call&& call) {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(to_torch(std::current_exception()));
  }
}

}  // namespace hbm
