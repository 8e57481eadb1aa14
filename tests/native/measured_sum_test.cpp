// measured_sum() for every supported pair of types, on every instruction set that this processor
// runs. The results must have the bits of a loop over single elements.
#include "kernels/error_feedback_passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "real_elements.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

struct Case {
  const Kernels* kernels;
  Dtype residual;
  Dtype gradient;
  bool squares;
};

std::string name_of(const Case& param) {
  return std::string(param.kernels->name) + "_" + dtype_name(param.residual) + "_plus_" +
         dtype_name(param.gradient) + (param.squares ? "_squares" : "");
}

void PrintTo(const Case& param, std::ostream* out) { *out << name_of(param); }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernels* kernels : runnable_kernels()) {
    for (Dtype residual : reference::kReals) {
      for (Dtype gradient : reference::kReals) {
        if (measured_sum_unsupported(residual, gradient) != nullptr) continue;
        for (bool squares : {false, true}) all.push_back({kernels, residual, gradient, squares});
      }
    }
  }
  return all;
}

template <class T>
double added(double before, double gradient, double factor) {
  // volatile, so that the product is rounded before it is added.
  const volatile T product = static_cast<T>(factor) * static_cast<T>(gradient);
  const volatile T sum = static_cast<T>(before) + product;
  return sum;
}

class MeasuredSumTest : public testing::TestWithParam<Case> {
 protected:
  using Elements = reference::Elements;

  Elements random_elements(size_t count, Dtype dtype) {
    return Elements::random(count, dtype, random_);
  }

  Measure expected(Elements& after, const Elements* before, const Elements& gradient,
                   double factor) const {
    double lanes[kSumLanes] = {}, gradient_sums[kSumLanes] = {};
    for (size_t i = 0; i < after.count(); ++i) {
      const double old = before == nullptr ? 0 : before->get(i);
      after.set(i, after.dtype() == Dtype::kFloat64 ? added<double>(old, gradient.get(i), factor)
                                                    : added<float>(old, gradient.get(i), factor));
      const volatile double residual_sum =
          GetParam().squares ? after.get(i) * after.get(i) : std::fabs(after.get(i));
      lanes[i % kSumLanes] += residual_sum;
      gradient_sums[i % kSumLanes] += std::fabs(gradient.get(i));
    }
    for (size_t half = kSumLanes / 2; half > 0; half /= 2) {
      for (size_t k = 0; k < half; ++k) {
        lanes[k] += lanes[k + half];
        gradient_sums[k] += gradient_sums[k + half];
      }
    }
    return {lanes[0], gradient_sums[0]};
  }

  static void expect_equal(const Measure& found, const Measure& wanted) {
    const auto same = [](double one, double other) {
      return one == other || (std::isnan(one) && std::isnan(other));
    };
    EXPECT_TRUE(same(found.residual_sum, wanted.residual_sum))
        << found.residual_sum << " instead of " << wanted.residual_sum;
    EXPECT_TRUE(same(found.gradient_sum, wanted.gradient_sum))
        << found.gradient_sum << " instead of " << wanted.gradient_sum;
  }

  void check(size_t count, double factor, bool zeros, bool non_temporal, size_t shift) {
    const auto [kernels, residual, gradient_type, squares] = GetParam();
    SCOPED_TRACE("count=" + std::to_string(count) + " factor=" + std::to_string(factor) +
                 " zeros=" + std::to_string(zeros) + " streamed=" + std::to_string(non_temporal) +
                 " shift=" + std::to_string(shift));
    const Elements before = random_elements(count, residual);
    const Elements gradient = random_elements(count, gradient_type);
    Elements after = random_elements(count, residual), wanted = after;
    after.shift(shift);
    wanted.shift(shift);
    const Measure measure = kernels->measure(residual, gradient_type, squares)({
        .after = after.data(),
        .before = zeros ? nullptr : before.data(),
        .gradient = gradient.data(),
        .count = count,
        .factor = factor,
        .non_temporal = non_temporal,
    });
    expect_equal(measure, expected(wanted, zeros ? nullptr : &before, gradient, factor));
    ASSERT_EQ(after.bytes(), wanted.bytes());
  }

  std::mt19937_64 random_ = test_random();
};

constexpr size_t kCounts[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 127, 1021, 4096, 5003};

TEST_P(MeasuredSumTest, AgreesWithOneElementAtATime) {
  for (double factor : {1.0, 0.0, -1.0, 0.1, 1e30, double{INFINITY}, double{NAN}}) {
    for (size_t count : kCounts) {
      for (size_t shift : {0, 1, 3}) check(count, factor, shift == 1, false, shift);
    }
  }
}

TEST_P(MeasuredSumTest, IsTheSameWithNonTemporalStores) {
  for (size_t count : kCounts) {
    for (size_t shift : {0, 2, 64}) check(count, 0.5, shift == 0, true, shift);
  }
}

TEST_P(MeasuredSumTest, AddsInPlace) {
  const auto [kernels, residual, gradient_type, squares] = GetParam();
  for (size_t count : kCounts) {
    SCOPED_TRACE("count=" + std::to_string(count));
    const Elements gradient = random_elements(count, gradient_type);
    Elements after = random_elements(count, residual);
    Elements wanted = after;
    const Measure measure = kernels->measure(
        residual, gradient_type, squares)({after.data(), after.data(), gradient.data(), count});
    expect_equal(measure, expected(wanted, &wanted, gradient, 1));
    ASSERT_EQ(after.bytes(), wanted.bytes());
  }
}

TEST_P(MeasuredSumTest, DetectsNonzeroAndNonFiniteGradients) {
  const auto [kernels, residual, gradient_type, squares] = GetParam();
  for (double special : {0.0, -0.0, std::ldexp(1, -20), double{INFINITY}, double{NAN}}) {
    Elements gradient(37, gradient_type), after(37, residual);
    gradient.set(random_() % 37, special);
    const Measure measure = kernels->measure(residual, gradient_type,
                                             squares)({after.data(), nullptr, gradient.data(), 37});
    EXPECT_EQ(measure.gradient_sum != 0, special != 0);
    EXPECT_EQ(std::isnan(measure.residual_sum), std::isnan(special));
    EXPECT_EQ(std::isinf(measure.residual_sum), std::isinf(special));
  }
}

INSTANTIATE_TEST_SUITE_P(MeasuredSum, MeasuredSumTest, testing::ValuesIn(cases()),
                         [](auto& info) { return name_of(info.param); });

TEST(MeasuredSum, TakesTenPairs) {
  int taken = 0;
  for (size_t i = 0; i < kDtypeCount * kDtypeCount; ++i) {
    const auto residual = static_cast<Dtype>(i / kDtypeCount);
    const auto gradient = static_cast<Dtype>(i % kDtypeCount);
    const bool takes = measured_sum_unsupported(residual, gradient) == nullptr;
    taken += takes;
    for (const Kernels* kernels : runnable_kernels()) {
      EXPECT_EQ(kernels->measure(residual, gradient, false) != nullptr, takes);
    }
  }
  EXPECT_EQ(taken, 10);
}

TEST(MeasuredSum, RunsOnSeveralThreads) {
  constexpr size_t kCount = 4096;
  const std::vector<float> gradient(2 * kCount, 0.5F);
  std::vector<float> after(2 * kCount, 1.0F);
  std::vector<Measure> measures(2);
  std::vector<std::jthread> threads;
  for (size_t k = 0; k < measures.size(); ++k) {
    threads.emplace_back([&, k] {
      float* const part = after.data() + k * kCount;
      measures[k] = measured_sum({part, part, gradient.data() + k * kCount, kCount},
                                 Dtype::kFloat32, Dtype::kFloat32, false);
    });
  }
  threads.clear();
  for (const Measure& measure : measures) EXPECT_EQ(measure.residual_sum, 1.5 * kCount);
  EXPECT_EQ(std::ranges::count(after, 1.5F), 2 * kCount);
}

}  // namespace
}  // namespace hbm::kernels
