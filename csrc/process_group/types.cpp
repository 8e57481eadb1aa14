#include "process_group/types.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "kernels/reduce.h"
#include "process_group/torch_version.h"

namespace hbm::process_group {

Dtype to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return Dtype::kBool;
    case at::kByte:
      return Dtype::kUInt8;
    case at::kChar:
      return Dtype::kInt8;
    case at::kUInt16:
      return Dtype::kUInt16;
    case at::kShort:
      return Dtype::kInt16;
    case at::kUInt32:
      return Dtype::kUInt32;
    case at::kInt:
      return Dtype::kInt32;
    case at::kUInt64:
      return Dtype::kUInt64;
    case at::kLong:
      return Dtype::kInt64;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kComplexHalf:
      return Dtype::kComplex32;
    case at::kComplexFloat:
      return Dtype::kComplex64;
    case at::kComplexDouble:
      return Dtype::kComplex128;
    case at::kFloat8_e5m2:
      return Dtype::kFloat8E5M2;
    case at::kFloat8_e4m3fn:
      return Dtype::kFloat8E4M3FN;
    case at::kFloat8_e5m2fnuz:
      return Dtype::kFloat8E5M2FNUZ;
    case at::kFloat8_e4m3fnuz:
      return Dtype::kFloat8E4M3FNUZ;
    case at::kFloat8_e8m0fnu:
      return Dtype::kFloat8E8M0FNU;
    case at::kFloat4_e2m1fn_x2:
      return Dtype::kFloat4E2M1X2;
    case at::kQInt8:
    case at::kQUInt8:
      return Dtype::kQuantized8;
    case at::kQInt32:
      return Dtype::kQuantized32;
    default:
      throw Error(ErrorKind::kUnsupported,
                  std::string("hbm does not move tensors of type ") + c10::toString(type));
  }
}

ReduceOp to_reduce_op(const c10d::ReduceOp& op, Dtype dtype) {
  const auto converted = [&op] {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return ReduceOp::kSum;
      case c10d::ReduceOp::AVG:
        return ReduceOp::kAvg;
      case c10d::ReduceOp::PRODUCT:
        return ReduceOp::kProduct;
      case c10d::ReduceOp::MIN:
        return ReduceOp::kMin;
      case c10d::ReduceOp::MAX:
        return ReduceOp::kMax;
      case c10d::ReduceOp::BAND:
        return ReduceOp::kBand;
      case c10d::ReduceOp::BOR:
        return ReduceOp::kBor;
      case c10d::ReduceOp::BXOR:
        return ReduceOp::kBxor;
      case c10d::ReduceOp::PREMUL_SUM:
        return ReduceOp::kPremulSum;
      default:
        throw Error(ErrorKind::kInvalid, "unknown reduction operator number " +
                                             std::to_string(static_cast<int>(op.op_)));
    }
  }();
  if (const char* reason = kernels::reduce_unsupported(dtype, converted)) {
    throw Error(ErrorKind::kUnsupported, std::string("cannot reduce ") + dtype_name(dtype) +
                                             " with " + reduce_op_name(converted) + ": " + reason);
  }
  return converted;
}

double premul_factor(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<PremulSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    throw Error(ErrorKind::kInvalid,
                "PREMUL_SUM came without its factor; make it by "
                "torch.distributed._make_nccl_premul_sum(factor)");
  }
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.item<double>();
  return supplement->double_factor;
}

namespace {

[[noreturn]] void throw_torch(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kInvalid:
    case ErrorKind::kUnsupported:
      C10_THROW_ERROR(ValueError, error.what());
    case ErrorKind::kExhausted:
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    case ErrorKind::kNetwork:
      C10_THROW_ERROR(DistNetworkError, error.what());
    default:
      C10_THROW_ERROR(DistBackendError, error.what());
  }
}

}  // namespace

std::exception_ptr to_torch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    try {
      throw_torch(ours);
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return error;
  }
}

}  // namespace hbm::process_group
