#include "kernels/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace hbm {
namespace {

class CopyTest : public testing::TestWithParam<size_t> {};

TEST_P(CopyTest, CopiesAllAndNoMore) {
  constexpr uint8_t kGuard = 0xA5;
  const size_t bytes = GetParam();
  std::mt19937 random(std::random_device{}());
  std::vector<uint8_t> from(bytes + 64);
  std::ranges::generate(from, [&] { return static_cast<uint8_t>(random()); });
  for (size_t skip_to : {0, 1, 63}) {
    for (size_t skip_from : {0, 1, 32}) {
      std::vector<uint8_t> to(bytes + 128, kGuard);
      std::vector<uint8_t> expected = to;
      std::copy_n(from.begin() + skip_from, bytes, expected.begin() + skip_to);
      copy_bytes(to.data() + skip_to, from.data() + skip_from, bytes);
      ASSERT_EQ(to, expected) << "to +" << skip_to << ", from +" << skip_from;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Copy, CopyTest,
                         testing::Values(0, 1, 7, 64, 4099, 128 * 1024, 300'001, kStreamedBytes - 1,
                                         kStreamedBytes, kStreamedBytes + 1,
                                         kStreamedBytes + 4097));

}  // namespace
}  // namespace hbm
