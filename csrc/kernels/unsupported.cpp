#include <algorithm>
#include <iterator>

#include "kernels/accumulate.h"
#include "kernels/reduce.h"

namespace hbm {
namespace {

enum class Kind { kBool, kInteger, kReal, kComplex, kScale, kPacked, kQuantized };

Kind kind_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kBool:
      return Kind::kBool;
    case Dtype::kUInt8:
    case Dtype::kInt8:
    case Dtype::kUInt16:
    case Dtype::kInt16:
    case Dtype::kUInt32:
    case Dtype::kInt32:
    case Dtype::kUInt64:
    case Dtype::kInt64:
      return Kind::kInteger;
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
    case Dtype::kFloat32:
    case Dtype::kFloat64:
    case Dtype::kFloat8E5M2:
    case Dtype::kFloat8E4M3FN:
    case Dtype::kFloat8E5M2FNUZ:
    case Dtype::kFloat8E4M3FNUZ:
      return Kind::kReal;
    case Dtype::kComplex32:
    case Dtype::kComplex64:
    case Dtype::kComplex128:
      return Kind::kComplex;
    case Dtype::kFloat8E8M0FNU:
      return Kind::kScale;
    case Dtype::kFloat4E2M1X2:
      return Kind::kPacked;
    case Dtype::kQuantized8:
    case Dtype::kQuantized32:
      break;
  }
  return Kind::kQuantized;
}

struct Pair {
  Dtype target, source;
  friend bool operator==(const Pair&, const Pair&) = default;
};

constexpr Pair kAccumulated[] = {
    {Dtype::kFloat32, Dtype::kFloat32},   {Dtype::kFloat32, Dtype::kFloat64},
    {Dtype::kFloat32, Dtype::kFloat16},   {Dtype::kFloat32, Dtype::kBFloat16},
    {Dtype::kFloat64, Dtype::kFloat64},   {Dtype::kFloat64, Dtype::kFloat32},
    {Dtype::kFloat16, Dtype::kFloat16},   {Dtype::kFloat16, Dtype::kFloat32},
    {Dtype::kBFloat16, Dtype::kBFloat16}, {Dtype::kBFloat16, Dtype::kFloat32},
    {Dtype::kInt32, Dtype::kInt32},       {Dtype::kInt64, Dtype::kInt64},
};

}  // namespace

const char* accumulate_unsupported(Dtype target, Dtype source) noexcept {
  if (std::ranges::find(kAccumulated, Pair{target, source}) != std::end(kAccumulated)) {
    return nullptr;
  }
  return "float32 takes float32, float64, float16 and bfloat16; float64, float16 and bfloat16 take "
         "their own type and float32; int32 and int64 take their own type";
}

const char* reduce_unsupported(Dtype dtype, ReduceOp op) noexcept {
  const Kind kind = kind_of(dtype);
  if (kind == Kind::kScale) return "its values are powers of two, which have neither zero nor sign";
  if (kind == Kind::kPacked)
    return "its values are halves of a byte, with no arithmetic in PyTorch";
  if (kind == Kind::kQuantized) return "quantized values mean nothing without their scale";
  switch (op) {
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return kind == Kind::kBool ? "a truth value cannot be divided or multiplied" : nullptr;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return kind == Kind::kComplex ? "complex numbers have no order" : nullptr;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return kind == Kind::kBool || kind == Kind::kInteger
                 ? nullptr
                 : "bitwise operators need integers or bool";
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      break;
  }
  return nullptr;
}

}  // namespace hbm
