// Floating-point formats narrower than float32: their codes to float32 and back, rounded to nearest
// even, bit for bit as PyTorch converts them. Free of branches, so that loops over them vectorise.
#pragma once

#include <cstdint>

namespace hbm {

struct Minifloat {
  int mantissa;        // bits
  int bias;            // of the exponent
  uint32_t sign;       // the sign bit
  uint32_t overflow;   // code of magnitudes that round beyond the largest finite one
  uint32_t nan;        // code of NaN
  bool infinite;       // has infinities: then `overflow` is one
  bool unsigned_zero;  // "fnuz": no infinity and no -0, whose code means NaN
};

inline constexpr Minifloat kHalf{10, 15, 0x8000, 0x7C00, 0x7E00, true, false};
inline constexpr Minifloat kE5M2{2, 15, 0x80, 0x7C, 0x7F, true, false};
inline constexpr Minifloat kE4M3FN{3, 7, 0x80, 0x7E, 0x7F, false, false};  // saturates
inline constexpr Minifloat kE5M2FNUZ{2, 16, 0x80, 0x80, 0x80, false, true};
inline constexpr Minifloat kE4M3FNUZ{3, 8, 0x80, 0x80, 0x80, false, true};

inline constexpr uint32_t kFloatSign = 0x80000000;
inline constexpr uint32_t kFloatInfinity = 0x7F800000;
inline constexpr uint32_t kFloatNan = 0x7FC00000;

[[gnu::always_inline]] constexpr float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

[[gnu::always_inline]] constexpr uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

// Magnitudes are signed integers: processors without AVX-512 compare no others.

template <Minifloat F>
[[gnu::always_inline]] constexpr float decode_minifloat(uint32_t code) {
  constexpr int shift = 23 - F.mantissa;
  constexpr int32_t rebias = (127 - F.bias) << 23;
  constexpr int32_t smallest_normal = rebias + (1 << 23);
  constexpr int32_t overflow = F.overflow;
  const auto magnitude = static_cast<int32_t>(code & (F.sign - 1));
  const uint32_t sign = (code & F.sign) * (kFloatSign / F.sign);

  const int32_t normal = (magnitude << shift) + rebias;
  // A subnormal is the mantissa of a number whose implicit one is then taken away.
  const auto subnormal = static_cast<int32_t>(
      bits_of(float_of((magnitude << shift) + smallest_normal) - float_of(smallest_normal)));
  int32_t bits = magnitude < 1 << F.mantissa ? subnormal : normal;
  if constexpr (F.infinite) bits = magnitude >= overflow ? kFloatInfinity : bits;
  if constexpr (F.unsigned_zero) return float_of(code == F.nan ? kFloatNan : bits | sign);
  return float_of(magnitude > overflow ? kFloatNan : bits | sign);
}

template <Minifloat F>
[[gnu::always_inline]] constexpr uint32_t encode_minifloat(float value) {
  constexpr int shift = 23 - F.mantissa;
  constexpr int32_t rebias = (127 - F.bias) << 23;
  constexpr int32_t smallest_normal = rebias + (1 << 23);
  // Added to a subnormal, it leaves the code in the last bits of the sum, rounded by the addition.
  constexpr int32_t aligner = smallest_normal + (shift << 23);
  constexpr int32_t overflow = F.overflow;
  const auto magnitude = static_cast<int32_t>(bits_of(value) & ~kFloatSign);

  const int32_t odd = magnitude >> shift & 1;
  const int32_t normal = (magnitude - rebias + ((1 << (shift - 1)) - 1 + odd)) >> shift;
  const auto subnormal =
      static_cast<int32_t>(bits_of(float_of(magnitude) + float_of(aligner))) - aligner;
  int32_t code = magnitude < smallest_normal ? subnormal : normal;
  code = code < overflow ? code : overflow;
  code = magnitude > static_cast<int32_t>(kFloatInfinity) ? static_cast<int32_t>(F.nan) : code;
  const uint32_t sign = (bits_of(value) & kFloatSign) / (kFloatSign / F.sign);
  if constexpr (F.unsigned_zero) return code == 0 ? 0 : code | sign;
  return code | sign;
}

[[gnu::always_inline]] constexpr float decode_bfloat16(uint16_t code) {
  return float_of(static_cast<uint32_t>(code) << 16);
}

[[gnu::always_inline]] constexpr uint16_t encode_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & ~kFloatSign) > kFloatInfinity ? kFloatNan >> 16 : rounded);
}

}  // namespace hbm
