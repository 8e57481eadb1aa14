// Compares the conversions of narrow floats with the definition of their formats. Tries every code,
// every midpoint between two codes, the numbers next to each midpoint, and random bits.
#include "kernels/minifloat.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "reduce_reference.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

constexpr int kRandomFloats = 200'000;

void expect_same(float got, float expected, uint32_t code) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << "code " << code;
  } else {
    EXPECT_EQ(bits_of(got), bits_of(expected)) << "code " << code;
  }
}

template <Minifloat F>
void check_encode(const reference::Format& format, float value) {
  ASSERT_EQ(encode_minifloat<F>(value), format.encode(value)) << std::hexfloat << value;
}

template <Minifloat F>
void check_format(const reference::Format& format) {
  for (uint32_t code = 0; code < format.codes(); ++code) {
    const float value = format.decode(code);
    expect_same(decode_minifloat<F>(code), value, code);
    check_encode<F>(format, value);
    const float next = format.decode((code + 1) % format.codes());
    const float between = value + (next - value) / 2;
    check_encode<F>(format, between);
    check_encode<F>(format, std::nextafter(between, -INFINITY));
    check_encode<F>(format, std::nextafter(between, INFINITY));
  }
  std::mt19937_64 random = test_random();
  for (int i = 0; i < kRandomFloats; ++i) {
    check_encode<F>(format, float_of(static_cast<uint32_t>(random())));
    // Numbers from 2^-32 to 2^32: the numbers of narrow formats are in this range.
    const float near_one = std::ldexp(1 + static_cast<float>(random() % 65536) / 65536,
                                      static_cast<int>(random() % 64) - 32);
    check_encode<F>(format, random() % 2 == 0 ? near_one : -near_one);
  }
  for (float edge : {464.0f, 480.0f, 61440.0f, 65520.0f, 65536.0f, 248.0f, 256.0f}) {
    for (float value : {std::nextafter(edge, 0.0f), edge, std::nextafter(edge, INFINITY)}) {
      check_encode<F>(format, value);
      check_encode<F>(format, -value);
    }
  }
}

TEST(Minifloat, Half) { check_format<kHalf>(reference::kHalf); }
TEST(Minifloat, E5M2) { check_format<kE5M2>(reference::kE5M2); }
TEST(Minifloat, E4M3FN) { check_format<kE4M3FN>(reference::kE4M3FN); }
TEST(Minifloat, E5M2FNUZ) { check_format<kE5M2FNUZ>(reference::kE5M2FNUZ); }
TEST(Minifloat, E4M3FNUZ) { check_format<kE4M3FNUZ>(reference::kE4M3FNUZ); }

TEST(Minifloat, BFloat16) {
  std::mt19937_64 random = test_random();
  for (uint32_t code = 0; code < 65536; ++code) {
    for (uint32_t rest :
         {0x0000u, 0x7FFFu, 0x8000u, 0x8001u, static_cast<uint32_t>(random() & 0xFFFF)}) {
      const float value = float_of(code << 16 | rest);
      if (std::isnan(value)) continue;  // round_bfloat16() takes only the canonical NaN
      ASSERT_EQ(round_bfloat16(value) >> 16, reference::encode_bfloat16(value));
    }
  }
  ASSERT_EQ(round_bfloat16(float_of(kFloatNan)) >> 16, reference::encode_bfloat16(NAN));
}

}  // namespace
}  // namespace hbm::kernels
