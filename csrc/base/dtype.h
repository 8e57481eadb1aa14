// Element types and reduction operators. Messages and kernels use the numbers of these enums.
// docs/design/reductions.md lists every place that must change for a new type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm {

// Message headers contain the values of the types of tensors, but never kUInt128 or kInt128. So a
// new type goes just before kUInt128, and the types before it keep their values.
enum class Dtype : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,   // two float16
  kComplex64,   // two float32
  kComplex128,  // two float64
  kFloat8E5M2,
  kFloat8E4M3FN,
  kFloat8E5M2FNUZ,
  kFloat8E4M3FNUZ,
  kFloat8E8M0FNU,  // a scale; has neither zero nor sign
  kFloat4E2M1X2,   // two 4-bit floats in a byte
  kQuantized8,     // integers; scale and zero point are stored elsewhere
  kQuantized32,
  kUInt128,  // kUInt128, kInt128: types of partial sums (kernels/partial_sum.h), not of tensors
  kInt128,
};
inline constexpr size_t kDtypeCount = 24;  // counts the types before kUInt128

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
};
inline constexpr size_t kReduceOpCount = 9;

// accumulate() (kernels/accumulate.h) adds a product to the target (kAdd), or assigns it to the
// target (kAssign). Message headers contain these values.
enum class Combine : uint8_t { kAdd, kAssign };
inline constexpr size_t kCombineCount = 2;

size_t element_size(Dtype dtype) noexcept;     // bytes
const char* dtype_name(Dtype dtype) noexcept;  // PyTorch's name without "torch."
const char* reduce_op_name(ReduceOp op) noexcept;

}  // namespace hbm
