// Converts PyTorch's types and operators to hbm's, and hbm's errors to PyTorch's.
//
// Threads: pure functions.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.h"

namespace hbm::process_group {

// Throws Error(kUnsupported) for a type that hbm does not move.
Dtype to_dtype(at::ScalarType type);

// Throws Error(kUnsupported) if `op` has no meaning for `dtype`, Error(kInvalid) if hbm does not
// know `op`.
ReduceOp to_reduce_op(const c10d::ReduceOp& op, Dtype dtype);

// Returns the factor of a PREMUL_SUM. Throws Error(kInvalid) if `op` has none.
double premul_factor(const c10d::ReduceOp& op);

// Converts an Error to PyTorch's ValueError, DistBackendError, DistNetworkError or
// OutOfMemoryError. Returns any other exception unchanged.
std::exception_ptr to_torch(const std::exception_ptr& error);

// Runs `call`; converts its exceptions by to_torch().
template <typename Call>
auto translated(Call&& call) {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(to_torch(std::current_exception()));
  }
}

}  // namespace hbm::process_group
