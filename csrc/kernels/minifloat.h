// Floating-point formats narrower than float32: conversions of their codes to float32 and back,
// rounded to nearest even, bit for bit as PyTorch converts them. The conversions have no branches,
// so that compilers can vectorise loops over them.
//
// Threads: pure functions.
#pragma once

#include <cstdint>

namespace hbm::kernels {

struct Minifloat {
  int mantissa;        // bits
  int bias;            // of the exponent
  uint32_t sign;       // the sign bit
  uint32_t overflow;   // the code of magnitudes that round beyond the largest finite number
  uint32_t nan;        // code of NaN
  bool infinite;       // has infinities; then `overflow` is infinity
  bool unsigned_zero;  // "fnuz": no infinity and no -0; the code of -0 means NaN
};

inline constexpr Minifloat kHalf{10, 15, 0x8000, 0x7C00, 0x7E00, true, false};
inline constexpr Minifloat kE5M2{2, 15, 0x80, 0x7C, 0x7F, true, false};
inline constexpr Minifloat kE4M3FN{3, 7, 0x80, 0x7E, 0x7F, false, false};  // overflow saturates
inline constexpr Minifloat kE5M2FNUZ{2, 16, 0x80, 0x80, 0x80, false, true};
inline constexpr Minifloat kE4M3FNUZ{3, 8, 0x80, 0x80, 0x80, false, true};

inline constexpr uint32_t kFloatSign = 0x80000000;
inline constexpr uint32_t kFloatInfinity = 0x7F800000;
inline constexpr uint32_t kFloatNan = 0x7FC00000;

// The conversions take a scalar, or a compiler vector type (vector_size) with 32-bit lanes.

template <class T, class Lane>
struct ShapedAs {
  typedef Lane Type __attribute__((vector_size(sizeof(T))));
};
template <class Lane>
struct ShapedAs<float, Lane> {
  using Type = Lane;
};
template <class Lane>
struct ShapedAs<uint32_t, Lane> {
  using Type = Lane;
};
template <class Lane>
struct ShapedAs<int32_t, Lane> {
  using Type = Lane;
};
template <class T>
using Floats = typename ShapedAs<T, float>::Type;
template <class T>
using Bits = typename ShapedAs<T, uint32_t>::Type;
template <class T>
using Integers = typename ShapedAs<T, int32_t>::Type;

template <class T>
[[gnu::always_inline]] constexpr Floats<T> float_of(T bits) {
  return __builtin_bit_cast(Floats<T>, bits);
}

template <class T>
[[gnu::always_inline]] constexpr Bits<T> bits_of(T value) {
  return __builtin_bit_cast(Bits<T>, value);
}

template <class T>
[[gnu::always_inline]] constexpr Integers<T> signed_of(T bits) {
  return __builtin_bit_cast(Integers<T>, bits);
}

// Magnitudes are signed integers, because processors without AVX-512 can compare only signed
// integers.

template <Minifloat F, class T>
[[gnu::always_inline]] constexpr Floats<T> decode_minifloat(T code) {
  constexpr int shift = 23 - F.mantissa;
  constexpr int32_t rebias = (127 - F.bias) << 23;
  constexpr int32_t smallest_normal = rebias + (1 << 23);
  constexpr int32_t overflow = F.overflow;
  constexpr int32_t infinity = kFloatInfinity;
  using Ints = Integers<T>;
  const auto magnitude = signed_of(code & (F.sign - 1));
  const T sign = (code & F.sign) * (kFloatSign / F.sign);

  const Ints normal = (magnitude << shift) + rebias;
  // Decodes a subnormal as the mantissa of a normal number, then subtracts that number's leading 1.
  const auto subnormal = signed_of(
      bits_of(float_of((magnitude << shift) + smallest_normal) - float_of(smallest_normal)));
  Ints bits = magnitude < (1 << F.mantissa) ? subnormal : normal;
  if constexpr (F.infinite) bits = magnitude >= overflow ? infinity : bits;
  if constexpr (F.unsigned_zero) return float_of(code == F.nan ? kFloatNan : bits_of(bits) | sign);
  return float_of(magnitude > overflow ? kFloatNan : bits_of(bits) | sign);
}

template <Minifloat F, class T>
[[gnu::always_inline]] constexpr Bits<T> encode_minifloat(T value) {
  constexpr int shift = 23 - F.mantissa;
  constexpr int32_t rebias = (127 - F.bias) << 23;
  constexpr int32_t smallest_normal = rebias + (1 << 23);
  // Adding this to a subnormal leaves the code in the last bits of the sum, rounded by the
  // addition.
  constexpr int32_t aligner = smallest_normal + (shift << 23);
  constexpr int32_t overflow = F.overflow;
  constexpr int32_t infinity = kFloatInfinity;
  constexpr int32_t nan = F.nan;
  using Ints = Integers<T>;
  const auto magnitude = signed_of(bits_of(value) & ~kFloatSign);

  const Ints odd = magnitude >> shift & 1;
  const Ints normal = (magnitude - rebias + ((1 << (shift - 1)) - 1 + odd)) >> shift;
  const Ints subnormal = signed_of(bits_of(float_of(magnitude) + float_of(aligner))) - aligner;
  Ints code = magnitude < smallest_normal ? subnormal : normal;
  code = code < overflow ? code : overflow;
  code = magnitude > infinity ? nan : code;
  const Bits<T> sign = (bits_of(value) & kFloatSign) / (kFloatSign / F.sign);
  if constexpr (F.unsigned_zero) return code == 0 ? 0 : bits_of(code) | sign;
  return bits_of(code) | sign;
}

// Rounds a number or the canonical NaN to the nearest bfloat16, the upper half of a float32. The
// lower half of the result is arbitrary.
template <class T>
[[gnu::always_inline]] constexpr Bits<T> round_bfloat16(T value) {
  const Bits<T> bits = bits_of(value);
  return bits + 0x7FFF + (bits >> 16 & 1);
}

}  // namespace hbm::kernels
