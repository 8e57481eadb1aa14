// Every dtype and operator on every instruction set that this processor runs, bit for bit against
// reduce_reference.h.
#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "reduce_reference.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct,
                             ReduceOp::kMin, ReduceOp::kMax,  ReduceOp::kBand,
                             ReduceOp::kBor, ReduceOp::kBxor, ReduceOp::kPremulSum};

constexpr size_t kManyLanes = 5003;  // many vectors of any dtype, and a remainder

std::vector<Dtype> reducible_dtypes() {
  std::vector<Dtype> dtypes;
  for (size_t i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    if (reduce_unsupported(dtype, ReduceOp::kSum) == nullptr) dtypes.push_back(dtype);
  }
  return dtypes;
}

using Bytes = std::vector<std::byte>;

// Returns random bits half of the time, else numbers between -2 and 2, whose sums stay finite.
Bytes random_elements(Dtype dtype, size_t count, std::mt19937_64& random) {
  Bytes bytes(count * element_size(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  if (random() % 2 == 0) return bytes;
  std::uniform_real_distribution<float> near_one(-2, 2);
  const auto fill = [&]<class T>(T, auto encode) {
    for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      reference::set<T>(bytes.data(), i, static_cast<T>(encode(near_one(random))));
    }
  };
  const auto same = [](float value) { return value; };
  const auto by = [](const reference::Format& format) {
    return [&format](float value) { return format.encode(value); };
  };
  switch (dtype) {
    case Dtype::kFloat16:
    case Dtype::kComplex32:
      fill(uint16_t{}, by(reference::kHalf));
      break;
    case Dtype::kBFloat16:
      fill(uint16_t{}, reference::encode_bfloat16);
      break;
    case Dtype::kFloat32:
    case Dtype::kComplex64:
      fill(float{}, same);
      break;
    case Dtype::kFloat64:
    case Dtype::kComplex128:
      fill(double{}, same);
      break;
    case Dtype::kFloat8E5M2:
      fill(uint8_t{}, by(reference::kE5M2));
      break;
    case Dtype::kFloat8E4M3FN:
      fill(uint8_t{}, by(reference::kE4M3FN));
      break;
    case Dtype::kFloat8E5M2FNUZ:
      fill(uint8_t{}, by(reference::kE5M2FNUZ));
      break;
    case Dtype::kFloat8E4M3FNUZ:
      fill(uint8_t{}, by(reference::kE4M3FNUZ));
      break;
    default:
      break;
  }
  return bytes;
}

struct Target {
  const Kernels* kernels;
  Dtype dtype;
};

std::vector<Target> targets() {
  std::vector<Target> all;
  for (const Kernels* kernels : runnable_kernels()) {
    for (Dtype dtype : reducible_dtypes()) all.push_back({kernels, dtype});
  }
  return all;
}

void PrintTo(const Target& target, std::ostream* out) {
  *out << target.kernels->name << " " << dtype_name(target.dtype);
}

std::string target_name(const testing::TestParamInfo<Target>& info) {
  return std::string(info.param.kernels->name) + "_" + dtype_name(info.param.dtype);
}

class ReduceTest : public testing::TestWithParam<Target> {
 protected:
  static constexpr std::byte kGuard{0xA5};

  // Compares one call with the reference. A destination d below `n` is the array of source d; from
  // `n` on, a destination is an array of its own. `shift` bytes move every array off its alignment.
  void check(size_t n, size_t count, ReduceOp op, const std::vector<size_t>& destinations,
             size_t shift = 0) {
    const auto [kernels, dtype] = GetParam();
    const size_t width = element_size(dtype);
    std::vector<Bytes> arrays(std::max(n, 1 + std::ranges::max(destinations)));
    for (Bytes& array : arrays) {
      array = random_elements(dtype, count, random_);
      array.insert(array.begin(), shift, kGuard);
      array.push_back(kGuard);
    }
    std::vector<const void*> sources;
    for (size_t k = 0; k < n; ++k) sources.push_back(arrays[k].data() + shift);
    const size_t divisor = 1 + random_() % 9;
    Bytes expected(count * width);
    reference::reduce(expected.data(), sources, count, dtype, op, divisor);

    std::vector<Bytes> wanted = arrays;
    std::vector<void*> outs;
    for (size_t k : destinations) {
      std::ranges::copy(expected, wanted[k].data() + shift);
      outs.push_back(arrays[k].data() + shift);
    }
    reduce_with(*kernels, outs.data(), outs.size(), sources.data(), n, count, dtype, op, divisor);

    for (size_t k = 0; k < arrays.size(); ++k) {
      const auto differs = std::ranges::mismatch(arrays[k], wanted[k]).in1 - arrays[k].begin();
      ASSERT_EQ(arrays[k], wanted[k])
          << reduce_op_name(op) << " n=" << n << " count=" << count << " divisor=" << divisor
          << " destinations=" << testing::PrintToString(destinations) << " shift=" << shift
          << ": array " << k << " differs from byte " << differs - shift;
    }
  }

  std::vector<ReduceOp> ops() const {
    std::vector<ReduceOp> defined;
    for (ReduceOp op : kOps) {
      if (reduce_unsupported(GetParam().dtype, op) == nullptr) defined.push_back(op);
    }
    return defined;
  }

  std::mt19937_64 random_ = test_random();
};

TEST_P(ReduceTest, AgreesWithReference) {
  for (ReduceOp op : ops()) {
    for (size_t n : {1, 2, 3, 4, 8, 64}) {
      for (size_t count : {0, 1, 2, 7, 31, 127, 1021}) check(n, count, op, {n});
    }
    for (size_t n : {1, 2, 3, 8}) check(n, kManyLanes, op, {n});
  }
}

TEST_P(ReduceTest, RunsInPlaceOfAnySource) {
  for (ReduceOp op : ops()) {
    for (size_t n : {1, 2, 3, 4}) {
      for (size_t alias = 0; alias < n; ++alias) check(n, kManyLanes, op, {alias});
    }
  }
}

TEST_P(ReduceTest, StoresInEveryDestination) {
  for (ReduceOp op : ops()) {
    for (size_t n : {1, 2, 3, 5}) {
      std::vector<size_t> destinations;
      for (size_t m = 1; m <= n; ++m) {
        destinations.insert(destinations.begin(), m - 1);
        for (size_t count : {0, 1, 7, 257, 1021}) check(n, count, op, destinations);
      }
      check(n, kManyLanes, op, destinations);
      check(n, 1021, op, {n, 0, n + 1}, 1);
    }
  }
}

TEST_P(ReduceTest, NeedsNoAlignment) {
  for (ReduceOp op : ops()) {
    for (size_t shift : {1, 3}) {
      check(2, 1021, op, {2}, shift);
      check(2, 1021, op, {1, 0}, shift);
      check(3, 1021, op, {1}, shift);
    }
  }
}

TEST_P(ReduceTest, RefusesUndefinedOperators) {
  const auto [kernels, dtype] = GetParam();
  const std::byte source[16] = {};
  std::byte out[16];
  const void* sources[] = {source, source};
  for (ReduceOp op : kOps) {
    if (reduce_unsupported(dtype, op) == nullptr) continue;
    try {
      void* const dst = out;
      reduce_with(*kernels, &dst, 1, sources, 2, 1, dtype, op, 1);
      FAIL() << reduce_op_name(op);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reduce, ReduceTest, testing::ValuesIn(targets()), target_name);

// Typed examples, on every instruction set.

template <class T>
std::vector<T> reduced(const Kernels& kernels, const std::vector<std::vector<T>>& sources,
                       Dtype dtype, ReduceOp op) {
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  std::vector<T> out(sources[0].size());
  void* const dst = out.data();
  reduce_with(kernels, &dst, 1, pointers.data(), pointers.size(), out.size(), dtype, op,
              sources.size());
  return out;
}

template <class T>
T scaled(const Kernels& kernels, T value, Dtype dtype, double factor) {
  T out;
  scale_with(kernels, &out, &value, 1, dtype, factor);
  return out;
}

class KernelsTest : public testing::TestWithParam<const Kernels*> {};

TEST_P(KernelsTest, AverageOfNarrowIntegersNeverOverflows) {
  using S = std::vector<int8_t>;
  EXPECT_EQ(reduced<int8_t>(*GetParam(), {{127, -128, -128, 1}, {127, -128, -127, -2}},
                            Dtype::kInt8, ReduceOp::kAvg),
            (S{127, -128, -127, 0}));
  using U = std::vector<uint8_t>;
  EXPECT_EQ(reduced<uint8_t>(*GetParam(), {{255, 255}, {255, 255}, {255, 254}}, Dtype::kUInt8,
                             ReduceOp::kAvg),
            (U{255, 254}));
}

TEST_P(KernelsTest, AverageOf64BitIntegersIsExact) {
  using S = std::vector<int64_t>;
  constexpr int64_t kLow = INT64_MIN, kHigh = INT64_MAX;
  EXPECT_EQ(
      reduced<int64_t>(*GetParam(),
                       {{kHigh, kLow, kLow, 1ll << 62, -7}, {kHigh, kLow, kHigh, 1ll << 62, 4}},
                       Dtype::kInt64, ReduceOp::kAvg),
      (S{kHigh, kLow, 0, 1ll << 62, -1}));
  using U = std::vector<uint64_t>;
  EXPECT_EQ(
      reduced<uint64_t>(*GetParam(), {{UINT64_MAX, UINT64_MAX}, {UINT64_MAX, 0}, {UINT64_MAX, 1}},
                        Dtype::kUInt64, ReduceOp::kAvg),
      (U{UINT64_MAX, UINT64_MAX / 3}));
}

// Leaders of nodes may add integers of 128 bits: the sums of their nodes' ranks.
TEST_P(KernelsTest, AverageOfPartialSumsIsExact) {
  const std::vector<__int128> sums = {static_cast<__int128>(INT64_MIN) * 3,
                                      static_cast<__int128>(INT64_MAX) * 3};
  const auto found = reduced<__int128>(*GetParam(), {sums, sums}, Dtype::kInt128, ReduceOp::kAvg);
  EXPECT_TRUE(found == sums);
  const auto whole = reduced<__int128>(*GetParam(), {sums, sums}, Dtype::kInt128, ReduceOp::kSum);
  EXPECT_TRUE(whole[0] == 2 * sums[0] && whole[1] == 2 * sums[1]);
}

TEST_P(KernelsTest, MinAndMaxPropagateNan) {
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto out =
        reduced<float>(*GetParam(), {{NAN, 1, 1}, {1, -NAN, 1}, {1, 1, NAN}}, Dtype::kFloat32, op);
    for (float value : out) EXPECT_EQ(reference::get<uint32_t>(&value, 0), 0x7FC00000u);
  }
}

TEST_P(KernelsTest, NarrowFloatsRoundOnce) {
  // 2048 + 1 + 1: rounding each step to float16 would stay at 2048.
  const auto code = [](float value) {
    return static_cast<uint16_t>(reference::kHalf.encode(value));
  };
  EXPECT_EQ(reduced<uint16_t>(*GetParam(), {{code(2048)}, {code(1)}, {code(1)}}, Dtype::kFloat16,
                              ReduceOp::kSum)[0],
            code(2050));
}

TEST_P(KernelsTest, ScalesFloats) {
  const Kernels& kernels = *GetParam();
  EXPECT_EQ(scaled(kernels, 3.0f, Dtype::kFloat32, 0.1), 3.0f * 0.1f);
  EXPECT_EQ(scaled(kernels, 3.0, Dtype::kFloat64, 0.1), 3.0 * 0.1);
  EXPECT_EQ(scaled(kernels, uint16_t{0x3F80}, Dtype::kBFloat16, -2), 0xC000);
  EXPECT_EQ(scaled(kernels, uint16_t{0x7BFF}, Dtype::kFloat16, 2), 0x7C00);
  EXPECT_EQ(scaled(kernels, uint8_t{0x7E}, Dtype::kFloat8E4M3FN, -2), 0xFE);
  EXPECT_EQ(scaled(kernels, uint8_t{0x7F}, Dtype::kFloat8E4M3FNUZ, 2), 0x80);
}

TEST_P(KernelsTest, ScalesIntegersTowardsZeroWithinRange) {
  const Kernels& kernels = *GetParam();
  EXPECT_EQ(scaled<int32_t>(kernels, -7, Dtype::kInt32, 0.5), -3);
  EXPECT_EQ(scaled<int32_t>(kernels, 3, Dtype::kInt32, 1.0 / 3), 1);
  EXPECT_EQ(scaled<int8_t>(kernels, 100, Dtype::kInt8, -2), -128);
  EXPECT_EQ(scaled<uint8_t>(kernels, 100, Dtype::kUInt8, 3), 255);
  EXPECT_EQ(scaled<uint16_t>(kernels, 100, Dtype::kUInt16, -1), 0);
  EXPECT_EQ(scaled<int32_t>(kernels, 1, Dtype::kInt32, NAN), 0);
  EXPECT_EQ(scaled<uint32_t>(kernels, 1, Dtype::kUInt32, INFINITY), UINT32_MAX);

  constexpr Dtype kSigned = Dtype::kInt64;
  EXPECT_EQ(scaled<int64_t>(kernels, 3, kSigned, 1.0 / 3), 1);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MAX, kSigned, 1), INT64_MAX);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MIN, kSigned, 1), INT64_MIN);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MIN, kSigned, -1), INT64_MAX);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MAX, kSigned, -2), INT64_MIN);
  EXPECT_EQ(scaled<int64_t>(kernels, (1ll << 62) + 3, kSigned, -0.5), -(1ll << 61) - 1);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MAX, kSigned, 1e-300), 0);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MAX, kSigned, 0), 0);
  EXPECT_EQ(scaled<int64_t>(kernels, -5, kSigned, -INFINITY), INT64_MAX);
  EXPECT_EQ(scaled<int64_t>(kernels, INT64_MAX, kSigned, NAN), 0);

  constexpr Dtype kUnsigned = Dtype::kUInt64;
  EXPECT_EQ(scaled<uint64_t>(kernels, UINT64_MAX, kUnsigned, 1), UINT64_MAX);
  EXPECT_EQ(scaled<uint64_t>(kernels, UINT64_MAX, kUnsigned, 0.5), UINT64_MAX / 2);
  EXPECT_EQ(scaled<uint64_t>(kernels, UINT64_MAX, kUnsigned, 1.5), UINT64_MAX);
  EXPECT_EQ(scaled<uint64_t>(kernels, UINT64_MAX, kUnsigned, -1), 0u);
}

// Scales many random elements in place, by fixed factors that include 0, NaN and infinity. Every
// instruction set gives the baseline's bits.
TEST_P(KernelsTest, ScaleAgreesWithBaseline) {
  std::mt19937_64 random = test_random();
  for (Dtype dtype : reducible_dtypes()) {
    if (reduce_unsupported(dtype, ReduceOp::kPremulSum) != nullptr) continue;
    for (double factor : {1.0, -0.3, 1e6, 0.0, double{NAN}, double{INFINITY}}) {
      Bytes expected = random_elements(dtype, kManyLanes, random);
      Bytes got = expected;
      scale_with(kBaselineKernels, expected.data(), expected.data(), kManyLanes, dtype, factor);
      scale_with(*GetParam(), got.data(), got.data(), kManyLanes, dtype, factor);
      EXPECT_EQ(got, expected) << dtype_name(dtype) << " times " << factor;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reduce, KernelsTest, testing::ValuesIn(runnable_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(KernelsNamed, PicksBestAndRefusesUnknown) {
  EXPECT_EQ(&kernels_named(""), runnable_kernels().front());
  for (const Kernels* kernels : runnable_kernels()) {
    EXPECT_EQ(&kernels_named(kernels->name), kernels);
  }
  try {
    kernels_named("sse9");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  }
}

TEST(ReduceUnsupported, InvalidCombinationsAreUnsupported) {
  EXPECT_EQ(reduce_unsupported(Dtype::kBool, ReduceOp::kBxor), nullptr);
  EXPECT_NE(reduce_unsupported(Dtype::kBool, ReduceOp::kAvg), nullptr);
  EXPECT_NE(reduce_unsupported(Dtype::kBool, ReduceOp::kPremulSum), nullptr);
  EXPECT_NE(reduce_unsupported(Dtype::kComplex64, ReduceOp::kMax), nullptr);
  EXPECT_NE(reduce_unsupported(Dtype::kFloat32, ReduceOp::kBor), nullptr);
  for (Dtype moved :
       {Dtype::kFloat8E8M0FNU, Dtype::kFloat4E2M1X2, Dtype::kQuantized8, Dtype::kQuantized32}) {
    for (ReduceOp op : kOps) EXPECT_NE(reduce_unsupported(moved, op), nullptr);
  }
  EXPECT_EQ(reducible_dtypes().size(), 20u);
}

}  // namespace
}  // namespace hbm::kernels
