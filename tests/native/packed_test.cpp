// pack() and unpack() for every pair of types, on every instruction set that this processor runs.
// The results must have the bits of a loop over single elements.
#include "kernels/error_feedback_passes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "real_elements.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

using reference::Elements;

struct Case {
  const Kernels* kernels;
  Dtype wire;
  Dtype array;  // of a residual, or of the buffer
};

std::string name_of(const Case& param) {
  return std::string(param.kernels->name) + "_" + dtype_name(param.array) + "_by_" +
         dtype_name(param.wire);
}

void PrintTo(const Case& param, std::ostream* out) { *out << name_of(param); }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernels* kernels : runnable_kernels()) {
    for (Dtype wire : reference::kReals) {
      for (Dtype array : reference::kReals) {
        if (pack_unsupported(wire, array) == nullptr) all.push_back({kernels, wire, array});
      }
    }
  }
  return all;
}

template <class T>
double product(double a, double b) {
  const volatile T result = static_cast<T>(a) * static_cast<T>(b);
  return result;
}

template <class T>
double difference(double a, double b) {
  const volatile T result = static_cast<T>(a) - static_cast<T>(b);
  return result;
}

template <class T>
void pack_one_by_one(Elements& wire, Elements& residual, double factor, double inverse) {
  for (size_t i = 0; i < residual.count(); ++i) {
    wire.set(i, product<T>(factor, residual.get(i)));
    if (element_size(wire.dtype()) >= element_size(residual.dtype())) continue;
    const double rest = difference<T>(residual.get(i), product<T>(inverse, wire.get(i)));
    residual.set(i, std::isfinite(wire.get(i)) ? rest : 0);
  }
}

class PackedTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr size_t kCounts[] = {0, 1, 2, 7, 16, 31, 33, 127, 1021, 5003};

  std::string trace(size_t count, size_t shift) const {
    return "count=" + std::to_string(count) + " shift=" + std::to_string(shift);
  }

  std::mt19937_64 random_ = test_random();
};

TEST_P(PackedTest, PacksAsOneElementAtATime) {
  const auto [kernels, wire_type, residual_type] = GetParam();
  for (double factor : {1.0, 0.25, 1.0 / 3, 1e30, double{INFINITY}}) {
    for (size_t count : kCounts) {
      for (size_t shift : {0, 1, 3}) {
        SCOPED_TRACE(trace(count, shift) + " factor=" + std::to_string(factor));
        Elements residual = Elements::random(count, residual_type, random_), kept = residual;
        Elements wire = Elements::random(count, wire_type, random_), sent = wire;
        for (Elements* elements : {&residual, &kept, &wire, &sent}) elements->shift(shift);
        if (residual_type == Dtype::kFloat64) {
          pack_one_by_one<double>(sent, kept, factor, 1 / factor);
        } else {
          pack_one_by_one<float>(sent, kept, factor, 1 / factor);
        }
        kernels->pack(wire_type,
                      residual_type)({wire.data(), residual.data(), count, factor, 1 / factor});
        ASSERT_EQ(wire.bytes(), sent.bytes());
        ASSERT_EQ(residual.bytes(), kept.bytes());
      }
    }
  }
}

TEST_P(PackedTest, UnpacksAsOneElementAtATime) {
  const auto [kernels, wire_type, buffer_type] = GetParam();
  for (size_t count : kCounts) {
    for (size_t shift : {0, 1, 3}) {
      SCOPED_TRACE(trace(count, shift));
      const Elements wire = Elements::random(count, wire_type, random_);
      Elements buffer = Elements::random(count, buffer_type, random_), wanted = buffer;
      for (Elements* elements : {&buffer, &wanted}) elements->shift(shift);
      bool finite = true;
      for (size_t i = 0; i < count; ++i) {
        wanted.set(i, wire.get(i));
        finite &= std::isfinite(wire.get(i));
      }
      EXPECT_EQ(kernels->unpack(buffer_type, wire_type)(buffer.data(), wire.data(), count), finite);
      ASSERT_EQ(buffer.bytes(), wanted.bytes());
    }
  }
}

TEST_P(PackedTest, DetectsNonFiniteElements) {
  const auto [kernels, wire_type, buffer_type] = GetParam();
  for (size_t count : {1, 15, 16, 133}) {
    Elements wire(count, wire_type), buffer(count, buffer_type);
    const Unpack unpack = kernels->unpack(buffer_type, wire_type);
    EXPECT_TRUE(unpack(buffer.data(), wire.data(), count));
    for (double special : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
      wire.set(random_() % count, special);
      EXPECT_FALSE(unpack(buffer.data(), wire.data(), count)) << special << " of " << count;
      wire = Elements(count, wire_type);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Packed, PackedTest, testing::ValuesIn(cases()),
                         [](auto& info) { return name_of(info.param); });

TEST(Packed, TakesElevenPairs) {
  int taken = 0;
  for (size_t i = 0; i < kDtypeCount * kDtypeCount; ++i) {
    const auto wire = static_cast<Dtype>(i / kDtypeCount);
    const auto array = static_cast<Dtype>(i % kDtypeCount);
    const bool takes = pack_unsupported(wire, array) == nullptr;
    taken += takes;
    EXPECT_EQ(unpack_unsupported(array, wire) == nullptr, takes);
    for (const Kernels* kernels : runnable_kernels()) {
      EXPECT_EQ(kernels->pack(wire, array) != nullptr, takes);
      EXPECT_EQ(kernels->unpack(array, wire) != nullptr, takes);
    }
  }
  EXPECT_EQ(taken, 11);
}

TEST(Packed, UsesTheChosenKernels) {
  float residual[] = {1, 2, 3}, wire[3], buffer[3];
  pack({wire, residual, 3, 0.5}, Dtype::kFloat32, Dtype::kFloat32);
  EXPECT_TRUE(unpack(buffer, wire, 3, Dtype::kFloat32, Dtype::kFloat32));
  EXPECT_EQ(buffer[2], 1.5F);
}

}  // namespace
}  // namespace hbm::kernels
