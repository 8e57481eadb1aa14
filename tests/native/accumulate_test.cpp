// accumulate() for every pair of types, on every instruction set that this processor runs. The
// results must have the bits of a loop over single elements.
#include "kernels/accumulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "real_elements.h"
#include "reduce_reference.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

struct Pair {
  Dtype target, source;
  friend bool operator==(const Pair&, const Pair&) = default;
};

constexpr Pair kPairs[] = {
    {Dtype::kFloat16, Dtype::kFloat16},   {Dtype::kFloat16, Dtype::kFloat32},
    {Dtype::kBFloat16, Dtype::kBFloat16}, {Dtype::kBFloat16, Dtype::kFloat32},
    {Dtype::kFloat32, Dtype::kFloat16},   {Dtype::kFloat32, Dtype::kBFloat16},
    {Dtype::kFloat32, Dtype::kFloat32},   {Dtype::kFloat32, Dtype::kFloat64},
    {Dtype::kFloat64, Dtype::kFloat32},   {Dtype::kFloat64, Dtype::kFloat64},
    {Dtype::kInt32, Dtype::kInt32},       {Dtype::kInt64, Dtype::kInt64},
};

constexpr double kScales[] = {1, 0, -1, 0.1, -2.5, 1e-30, 1e30, INFINITY, NAN};

using Bytes = std::vector<std::byte>;
using reference::get_real;
using reference::set_real;

template <class T>
double combined_real(double target, double source, const Formula& formula) {
  // volatile, so that the product is rounded before it is added.
  const volatile T product = static_cast<T>(formula.scale) * static_cast<T>(source);
  if (formula.combine == Combine::kAssign) return product;
  const volatile T sum = static_cast<T>(target) + product;
  return sum;
}

template <class T>
T combined_integer(T target, T source, const Formula& formula) {
  const int64_t product = scale_integer(static_cast<int64_t>(source), formula.scale);
  const auto clamped =
      std::clamp<int64_t>(product, std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
  if (formula.combine == Combine::kAssign) return static_cast<T>(clamped);
  return static_cast<T>(static_cast<uint64_t>(target) + static_cast<uint64_t>(clamped));
}

void expect_one(void* target, const void* source, size_t i, const Formula& formula) {
  const auto integer = [&]<class T>(T) {
    const T a = reference::get<T>(target, i), b = reference::get<T>(source, i);
    reference::set<T>(target, i, combined_integer(a, b, formula));
  };
  if (formula.target == Dtype::kInt32) return integer(int32_t{});
  if (formula.target == Dtype::kInt64) return integer(int64_t{});
  const double a = get_real(target, i, formula.target), b = get_real(source, i, formula.source);
  const bool wide = formula.target == Dtype::kFloat64 || formula.source == Dtype::kFloat64;
  set_real(target, i, formula.target,
           wide ? combined_real<double>(a, b, formula) : combined_real<float>(a, b, formula));
}

struct Case {
  const Kernels* kernels;
  Pair types;
  Combine combine;
};

std::string name_of(const Case& param) {
  return std::string(param.kernels->name) + "_" + dtype_name(param.types.target) +
         (param.combine == Combine::kAdd ? "_plus_" : "_becomes_") + dtype_name(param.types.source);
}

void PrintTo(const Case& param, std::ostream* out) { *out << name_of(param); }

std::vector<Case> cases(bool equal_types_alone) {
  std::vector<Case> all;
  for (const Kernels* kernels : runnable_kernels()) {
    for (const Pair& types : kPairs) {
      if (equal_types_alone && types.target != types.source) continue;
      for (Combine combine : {Combine::kAdd, Combine::kAssign}) {
        all.push_back({kernels, types, combine});
      }
    }
  }
  return all;
}

class AccumulateTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr std::byte kGuard{0xA5};

  // Returns elements of random bits. About half of the elements of real types are numbers between
  // -2 and 2: their sums are often rounded, and infinite only with a large scale.
  Bytes random_elements(size_t count, Dtype dtype) {
    Bytes bytes(count * element_size(dtype));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    if (dtype == Dtype::kInt32 || dtype == Dtype::kInt64) return bytes;
    for (size_t i = 0; i < count; i += 1 + random_() % 3) {
      set_real(bytes.data(), i, dtype, std::uniform_real_distribution<>(-2, 2)(random_));
    }
    return bytes;
  }

  void check(size_t count, double scale, bool in_place, size_t shift) {
    const auto [kernels, types, combine] = GetParam();
    Bytes target = random_elements(count, types.target);
    Bytes source = in_place ? target : random_elements(count, types.source);
    Bytes expected = target;
    for (size_t i = 0; i < count; ++i) {
      expect_one(expected.data(), source.data(), i, {types.target, types.source, combine, scale});
    }
    for (Bytes* array : {&target, &source, &expected}) {
      array->insert(array->begin(), shift, kGuard);
      array->push_back(kGuard);
    }
    const std::byte* from = in_place ? target.data() : source.data();
    const Accumulate kernel = kernels->accumulate(types.target, types.source, combine);
    kernel(target.data() + shift, from + shift, count, scale);
    const auto differs = std::ranges::mismatch(target, expected).in1 - target.begin();
    ASSERT_EQ(target, expected) << "count=" << count << " scale=" << scale << " shift=" << shift
                                << " in_place=" << in_place << ": differs from byte "
                                << differs - shift;
  }

  std::mt19937_64 random_ = test_random();
};

TEST_P(AccumulateTest, AgreesWithOneElementAtATime) {
  for (double scale : kScales) {
    for (size_t count : {0, 1, 2, 7, 31, 33, 127, 1021, 5003}) {
      for (size_t shift : {0, 1, 3}) check(count, scale, false, shift);
    }
  }
}

using AccumulateInPlaceTest = AccumulateTest;

TEST_P(AccumulateInPlaceTest, MayUseTheTargetAsSource) {
  for (double scale : kScales) {
    for (size_t count : {1, 31, 2047}) check(count, scale, true, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Accumulate, AccumulateTest, testing::ValuesIn(cases(false)),
                         [](auto& info) { return name_of(info.param); });
INSTANTIATE_TEST_SUITE_P(Accumulate, AccumulateInPlaceTest, testing::ValuesIn(cases(true)),
                         [](auto& info) { return name_of(info.param); });

TEST(Accumulate, TakesTwelvePairs) {
  for (size_t i = 0; i < kDtypeCount * kDtypeCount; ++i) {
    const Pair types{static_cast<Dtype>(i / kDtypeCount), static_cast<Dtype>(i % kDtypeCount)};
    const bool taken = std::ranges::count(kPairs, types) != 0;
    SCOPED_TRACE(std::string(dtype_name(types.target)) + " from " + dtype_name(types.source));
    EXPECT_EQ(accumulate_unsupported(types.target, types.source) == nullptr, taken);
    for (const Kernels* kernels : runnable_kernels()) {
      for (Combine combine : {Combine::kAdd, Combine::kAssign}) {
        EXPECT_EQ(kernels->accumulate(types.target, types.source, combine) != nullptr, taken);
      }
    }
  }
}

TEST(Accumulate, UsesTheChosenKernels) {
  float target[] = {1, 2, 3};
  const float source[] = {10, 20, 30};
  accumulate(target, source, 3,
             {.target = Dtype::kFloat32, .source = Dtype::kFloat32, .scale = 0.5});
  EXPECT_EQ(target[0], 6);
  EXPECT_EQ(target[1], 12);
  EXPECT_EQ(target[2], 18);
}

// 1 + 2^-24 is halfway between two numbers of float32, and is rounded to 1. The source is larger by
// 2^-52, which only float64 can hold. So the sum is above the middle, and is rounded up.
TEST(Accumulate, IsComputedInTheWiderType) {
  float target = 1;
  const double source = std::ldexp(1, -24) + std::ldexp(1, -52);
  accumulate(&target, &source, 1, {.target = Dtype::kFloat32, .source = Dtype::kFloat64});
  EXPECT_EQ(target, std::nextafter(1.0f, 2.0f));
}

}  // namespace
}  // namespace hbm::kernels
