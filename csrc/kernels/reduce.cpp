#include "kernels/reduce.h"

#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/kernels.h"

namespace hbm::kernels {
namespace {

enum class NumberKind {
  kBool,
  kInteger,
  kPartialSum,
  kReal,
  kComplex,
  kScale,
  kPacked,
  kQuantized
};

NumberKind kind_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kBool:
      return NumberKind::kBool;
    case Dtype::kUInt8:
    case Dtype::kInt8:
    case Dtype::kUInt16:
    case Dtype::kInt16:
    case Dtype::kUInt32:
    case Dtype::kInt32:
    case Dtype::kUInt64:
    case Dtype::kInt64:
      return NumberKind::kInteger;
    case Dtype::kUInt128:
    case Dtype::kInt128:
      return NumberKind::kPartialSum;
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
    case Dtype::kFloat32:
    case Dtype::kFloat64:
    case Dtype::kFloat8E5M2:
    case Dtype::kFloat8E4M3FN:
    case Dtype::kFloat8E5M2FNUZ:
    case Dtype::kFloat8E4M3FNUZ:
      return NumberKind::kReal;
    case Dtype::kComplex32:
    case Dtype::kComplex64:
    case Dtype::kComplex128:
      return NumberKind::kComplex;
    case Dtype::kFloat8E8M0FNU:
      return NumberKind::kScale;
    case Dtype::kFloat4E2M1X2:
      return NumberKind::kPacked;
    case Dtype::kQuantized8:
    case Dtype::kQuantized32:
      break;
  }
  return NumberKind::kQuantized;
}

constexpr int kMantissa = 53;  // bits of a float64
constexpr uint64_t kExact = uint64_t{1} << kMantissa;

// trunc(magnitude * factor), at most `limit`, for factor >= 0.
uint64_t scale_magnitude(uint64_t magnitude, double factor, uint64_t limit) noexcept {
  if (magnitude <= kExact || !std::isfinite(factor)) {
    const double product = static_cast<double>(magnitude) * factor;
    if (std::isnan(product)) return 0;
    return product < static_cast<double>(limit) ? static_cast<uint64_t>(product) : limit;
  }
  int exponent;
  const double fraction = std::frexp(factor, &exponent);  // 0, or in [0.5, 1)
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, kMantissa));
  const unsigned __int128 product = static_cast<unsigned __int128>(magnitude) * mantissa;
  const int shift = kMantissa - exponent;
  if (product == 0 || shift >= 128) return 0;
  if (shift <= 0) return limit;  // the product exceeds 2^105
  const unsigned __int128 scaled = product >> shift;
  return scaled < limit ? static_cast<uint64_t>(scaled) : limit;
}

Plan plan_for(const Kernels& kernels, Dtype dtype, ReduceOp op) {
  if (const char* reason = reduce_unsupported(dtype, op)) {
    throw Error(ErrorKind::kUnsupported, std::string(reduce_op_name(op)) + " of " +
                                             dtype_name(dtype) + " is not defined: " + reason);
  }
  return kernels.plan(dtype, op);
}

}  // namespace

const char* reduce_unsupported(Dtype dtype, ReduceOp op) noexcept {
  const NumberKind kind = kind_of(dtype);
  if (kind == NumberKind::kScale)
    return "its values are powers of two, which have neither zero nor sign";
  if (kind == NumberKind::kPacked)
    return "its values are halves of a byte, with no arithmetic in PyTorch";
  if (kind == NumberKind::kQuantized) return "quantized values mean nothing without their scale";
  if (kind == NumberKind::kPartialSum) {
    return op == ReduceOp::kSum || op == ReduceOp::kAvg ? nullptr : "partial sums are only added";
  }
  switch (op) {
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return kind == NumberKind::kBool ? "a truth value cannot be divided or multiplied" : nullptr;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return kind == NumberKind::kComplex ? "complex numbers have no order" : nullptr;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return kind == NumberKind::kBool || kind == NumberKind::kInteger
                 ? nullptr
                 : "bitwise operators need integers or bool";
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      break;
  }
  return nullptr;
}

const char* reduce_isa() { return chosen_kernels().name; }

void reduce_with(const Kernels& kernels, void* const* dsts, size_t m, const void* const* srcs,
                 size_t n, size_t count, Dtype dtype, ReduceOp op, size_t divisor) {
  const Plan plan = plan_for(kernels, dtype, op);
  if (n == 1 && op != ReduceOp::kAvg) {
    for (size_t k = 0; k < m; ++k) {
      if (dsts[k] != srcs[0]) copy_bytes(dsts[k], srcs[0], count * element_size(dtype));
    }
    return;
  }
  plan.fold({dsts, m, srcs, n, count * plan.lanes}, divisor);
}

void scale_with(const Kernels& kernels, void* dst, const void* src, size_t count, Dtype dtype,
                double factor) {
  const Plan plan = plan_for(kernels, dtype, ReduceOp::kPremulSum);
  plan.scale(dst, src, count * plan.lanes, factor);
}

void reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype, ReduceOp op,
            size_t divisor) {
  reduce_to(&dst, 1, srcs, n, count, dtype, op, divisor);
}

void reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n, size_t count,
               Dtype dtype, ReduceOp op, size_t divisor) {
  reduce_with(chosen_kernels(), dsts, m, srcs, n, count, dtype, op, divisor);
}

void scale(void* dst, const void* src, size_t count, Dtype dtype, double factor) {
  scale_with(chosen_kernels(), dst, src, count, dtype, factor);
}

int64_t scale_integer(int64_t value, double factor) noexcept {
  constexpr uint64_t kHighest = std::numeric_limits<int64_t>::max();
  const bool negative = (value < 0) != std::signbit(factor);
  const uint64_t magnitude = value < 0 ? -static_cast<uint64_t>(value) : value;
  const uint64_t scaled = scale_magnitude(magnitude, std::fabs(factor), kHighest + negative);
  return static_cast<int64_t>(negative ? -scaled : scaled);
}

uint64_t scale_integer(uint64_t value, double factor) noexcept {
  constexpr uint64_t kHighest = std::numeric_limits<uint64_t>::max();
  if (!(factor > 0)) return 0;
  return scale_magnitude(value, factor, kHighest);
}

}  // namespace hbm::kernels
