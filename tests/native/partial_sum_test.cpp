// Sums of integers in a wider type, and their means.
#include "kernels/partial_sum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace hbm::kernels {
namespace {

TEST(PartialSum, HoldsTheStatedNumberOfRanks) {
  EXPECT_EQ(partial_sum_type(Dtype::kInt8, 256), Dtype::kInt16);
  EXPECT_EQ(partial_sum_type(Dtype::kInt8, 257), Dtype::kInt32);
  EXPECT_EQ(partial_sum_type(Dtype::kUInt8, 256), Dtype::kUInt16);
  EXPECT_EQ(partial_sum_type(Dtype::kUInt8, 257), Dtype::kUInt32);
  EXPECT_EQ(partial_sum_type(Dtype::kInt16, 65'536), Dtype::kInt32);
  EXPECT_EQ(partial_sum_type(Dtype::kUInt16, 65'537), Dtype::kUInt64);
  EXPECT_EQ(partial_sum_type(Dtype::kUInt32, 2), Dtype::kUInt64);
  EXPECT_EQ(partial_sum_type(Dtype::kInt32, 100'000), Dtype::kInt64);
  EXPECT_EQ(partial_sum_type(Dtype::kInt64, 2), Dtype::kInt128);
  EXPECT_EQ(partial_sum_type(Dtype::kUInt64, 100'000), Dtype::kUInt128);
  for (const Dtype dtype : {Dtype::kBool, Dtype::kFloat16}) {
    EXPECT_EQ(partial_sum_type(dtype, 2), std::nullopt);
  }
}

TEST(PartialSum, KeepsTheSignWhenItWidens) {
  const std::vector<int8_t> values = {-128, -1, 0, 127};
  std::vector<int16_t> wide(values.size());
  widen(wide.data(), Dtype::kInt16, values.data(), Dtype::kInt8, values.size());
  EXPECT_EQ(wide, (std::vector<int16_t>{-128, -1, 0, 127}));
  const std::vector<uint8_t> bytes = {0, 255};
  std::vector<uint32_t> words(bytes.size());
  widen(words.data(), Dtype::kUInt32, bytes.data(), Dtype::kUInt8, bytes.size());
  EXPECT_EQ(words, (std::vector<uint32_t>{0, 255}));
}

// The averages are rounded towards zero, and overwrite one of the sources, whose type is wider.
TEST(PartialSum, AverageMayReplaceASource) {
  constexpr size_t kCount = 10'007;
  std::vector<int16_t> one(kCount), other(kCount);
  std::iota(one.begin(), one.end(), static_cast<int16_t>(-5'000));
  std::iota(other.begin(), other.end(), static_cast<int16_t>(-5'001));
  std::vector<int8_t> expected;
  for (size_t i = 0; i < kCount; ++i) {
    expected.push_back(static_cast<int8_t>((one[i] + other[i]) / 100));
  }
  const void* const sources[] = {one.data(), other.data()};
  average(one.data(), Dtype::kInt8, sources, 2, kCount, Dtype::kInt16, 100);
  const auto* const found = reinterpret_cast<const int8_t*>(one.data());
  EXPECT_EQ(std::vector<int8_t>(found, found + kCount), expected);
}

TEST(PartialSum, AverageOf64BitIntegersIsExact) {
  constexpr size_t kCount = 1'003;  // more 128-bit sums than average() handles in one step
  const std::vector<int64_t> values(kCount, INT64_MIN);
  std::vector<__int128> node(kCount);
  widen(node.data(), Dtype::kInt128, values.data(), Dtype::kInt64, kCount);
  const void* const sources[] = {node.data(), node.data(), node.data()};
  average(node.data(), Dtype::kInt64, sources, 3, kCount, Dtype::kInt128, 3);
  const auto* const found = reinterpret_cast<const int64_t*>(node.data());
  EXPECT_EQ(std::vector<int64_t>(found, found + kCount), values);
}

}  // namespace
}  // namespace hbm::kernels
