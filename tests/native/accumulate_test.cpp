// accumulate() for every type on every instruction set that this processor runs, bit for bit
// against one element at a time.
#include "reduce/accumulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "reduce/kernels.h"
#include "reduce/scale_integer.h"
#include "reduce_reference.h"

namespace hbm {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32,
                             Dtype::kFloat64, Dtype::kInt32,    Dtype::kInt64};

constexpr double kScales[] = {1, 0, -1, 0.1, -2.5, 1e-30, 1e30, INFINITY, NAN};

using Bytes = std::vector<std::byte>;

template <class T>
T sum_real(T target, T source, double scale) {
  const volatile T product = static_cast<T>(scale) * source;  // volatile: rounded on its own
  return reference::canonical<T>(target + product);
}

template <class T>
T sum_integer(T target, T source, double scale) {
  const int64_t product = scale_integer(static_cast<int64_t>(source), scale);
  const auto clamped =
      std::clamp<int64_t>(product, std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
  return static_cast<T>(static_cast<uint64_t>(target) + static_cast<uint64_t>(clamped));
}

void expect_one(void* target, const void* source, size_t i, Dtype dtype, double scale) {
  const auto combine = [&]<class T>(T, auto sum) {
    reference::set<T>(target, i, sum(reference::get<T>(target, i), reference::get<T>(source, i)));
  };
  const auto half = [&](uint16_t a, uint16_t b) {
    const reference::Format& format = reference::kHalf;
    const float sum = sum_real(format.decode(a), format.decode(b), scale);
    return static_cast<uint16_t>(format.encode(sum));
  };
  const auto bfloat16 = [&](uint16_t a, uint16_t b) {
    const auto decode = reference::decode_bfloat16;
    return reference::encode_bfloat16(sum_real(decode(a), decode(b), scale));
  };
  const auto real = [&](auto a, auto b) { return sum_real(a, b, scale); };
  const auto integer = [&](auto a, auto b) { return sum_integer(a, b, scale); };
  switch (dtype) {
    case Dtype::kFloat16:
      return combine(uint16_t{}, half);
    case Dtype::kBFloat16:
      return combine(uint16_t{}, bfloat16);
    case Dtype::kFloat32:
      return combine(float{}, real);
    case Dtype::kFloat64:
      return combine(double{}, real);
    case Dtype::kInt32:
      return combine(int32_t{}, integer);
    default:
      return combine(int64_t{}, integer);
  }
}

struct Case {
  const Kernels* kernels;
  Dtype dtype;
};

void PrintTo(const Case& param, std::ostream* out) {
  *out << param.kernels->name << " " << dtype_name(param.dtype);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernels* kernels : runnable_kernels()) {
    for (Dtype dtype : kDtypes) all.push_back({kernels, dtype});
  }
  return all;
}

class AccumulateTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr std::byte kGuard{0xA5};

  // Random bits, and numbers near 1, whose sums are rounded more often than they are infinite.
  Bytes random_elements(size_t count) {
    Bytes bytes(count * element_size(GetParam().dtype));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    const auto near_one = [&]<class T>(T, auto encode) {
      for (size_t i = 0; i < count; i += 1 + random_() % 3) {
        const double value = std::uniform_real_distribution<>(-2, 2)(random_);
        reference::set<T>(bytes.data(), i, static_cast<T>(encode(value)));
      }
    };
    const auto same = [](double value) { return value; };
    switch (GetParam().dtype) {
      case Dtype::kFloat16:
        near_one(uint16_t{},
                 [](double value) { return reference::kHalf.encode(static_cast<float>(value)); });
        break;
      case Dtype::kBFloat16:
        near_one(uint16_t{}, [](double value) {
          return reference::encode_bfloat16(static_cast<float>(value));
        });
        break;
      case Dtype::kFloat32:
        near_one(float{}, same);
        break;
      case Dtype::kFloat64:
        near_one(double{}, same);
        break;
      default:
        break;
    }
    return bytes;
  }

  void check(size_t count, double scale, bool in_place, size_t shift) {
    const auto [kernels, dtype] = GetParam();
    Bytes target = random_elements(count);
    Bytes source = in_place ? target : random_elements(count);
    Bytes expected = target;
    for (size_t i = 0; i < count; ++i) {
      expect_one(expected.data(), source.data(), i, dtype, scale);
    }
    for (Bytes* array : {&target, &source, &expected}) {
      array->insert(array->begin(), shift, kGuard);
      array->push_back(kGuard);
    }
    const std::byte* from = in_place ? target.data() : source.data();
    kernels->accumulate(dtype)(target.data() + shift, from + shift, count, scale);
    const auto differs = std::ranges::mismatch(target, expected).in1 - target.begin();
    ASSERT_EQ(target, expected) << "count=" << count << " scale=" << scale << " shift=" << shift
                                << " in_place=" << in_place << " seed=" << seed_
                                << ": differs from byte " << differs - shift;
  }

  const unsigned seed_ = std::random_device()();
  std::mt19937_64 random_{seed_};
};

TEST_P(AccumulateTest, AgreesWithOneElementAtATime) {
  for (double scale : kScales) {
    for (size_t count : {0, 1, 2, 7, 31, 33, 127, 1021, 5003}) {
      for (size_t shift : {0, 1, 3}) check(count, scale, false, shift);
    }
  }
}

TEST_P(AccumulateTest, AddsToItself) {
  for (double scale : kScales) {
    for (size_t count : {1, 31, 2047}) check(count, scale, true, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Accumulate, AccumulateTest, testing::ValuesIn(cases()), [](auto& info) {
  return std::string(info.param.kernels->name) + "_" + dtype_name(info.param.dtype);
});

TEST(Accumulate, TakesSixTypes) {
  for (size_t i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const bool taken = std::ranges::count(kDtypes, dtype) != 0;
    EXPECT_EQ(accumulate_unsupported(dtype) == nullptr, taken) << dtype_name(dtype);
    for (const Kernels* kernels : runnable_kernels()) {
      EXPECT_EQ(kernels->accumulate(dtype) != nullptr, taken) << dtype_name(dtype);
    }
  }
}

TEST(Accumulate, UsesTheChosenKernels) {
  float target[] = {1, 2, 3};
  const float source[] = {10, 20, 30};
  accumulate(target, source, 3, Dtype::kFloat32, 0.5);
  EXPECT_EQ(target[0], 6);
  EXPECT_EQ(target[1], 12);
  EXPECT_EQ(target[2], 18);
}

}  // namespace
}  // namespace hbm
