#include "kernels/copy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/copy_to_peers.h"
#include "kernels/tuning.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

class CopyTest : public testing::TestWithParam<size_t> {};

TEST_P(CopyTest, CopiesExactlyTheGivenBytes) {
  constexpr uint8_t kGuard = 0xA5;
  const size_t bytes = GetParam();
  std::mt19937_64 random = test_random();
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
                         testing::Values(0, 1, 7, 64, 4099, 128 * 1024, 300'001,
                                         kNonTemporalFromAtMostBytes - 1,
                                         kNonTemporalFromAtMostBytes,
                                         kNonTemporalFromAtMostBytes + 1,
                                         kNonTemporalFromAtMostBytes + 4097));

// copy_part() makes a part of a copy that as a whole is large enough for non-temporal stores. The
// part has any start and end within a cache line.
TEST(Copy, PartsOfALargeCopyAreCorrect) {
  std::mt19937_64 random = test_random();
  std::vector<uint8_t> from(5 * 4096);
  std::ranges::generate(from, [&] { return static_cast<uint8_t>(random()); });
  for (int trial = 0; trial < 500; ++trial) {
    const size_t skip = random() % 200;
    const size_t bytes = random() % (from.size() - skip + 1);
    std::vector<uint8_t> to(from.size() + 200, 0xA5);
    std::vector<uint8_t> expected = to;
    const size_t at = random() % 200;
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(skip), bytes,
                expected.begin() + static_cast<ptrdiff_t>(at));
    copy_part(to.data() + at, from.data() + skip, bytes, kNonTemporalFromAtMostBytes);
    ASSERT_EQ(to, expected) << bytes << " bytes, to +" << at << ", from +" << skip;
  }
}

// In some calls CopyToPeers uses cached stores, in others non-temporal stores. Every copy is
// complete, with any start and end within a cache line.
TEST(Copy, ToPeersIsWholeInEveryTurn) {
  std::mt19937_64 random = test_random();
  std::vector<uint8_t> from(96 << 10);
  CopyToPeers copy;
  for (int turn = 0; turn < 200; ++turn) {
    std::ranges::generate(from, [&] { return static_cast<uint8_t>(random()); });
    const size_t bytes = turn % 3 == 0 ? random() % from.size() : from.size() - random() % 9;
    const size_t at = random() % 70;
    std::vector<uint8_t> to(from.size() + 70, 0xA5);
    std::vector<uint8_t> expected = to;
    std::copy_n(from.begin(), bytes, expected.begin() + static_cast<ptrdiff_t>(at));
    copy(to.data() + at, from.data(), bytes);
    ASSERT_EQ(to, expected) << bytes << " bytes, to +" << at << ", turn " << turn;
  }
}

TEST(Copy, PrefersAKindOnceTwoPairsAgree) {
  using std::chrono::nanoseconds;
  const auto record = [](CachePreference& preference, int cached, int non_temporal) {
    preference.record(nanoseconds(cached), nanoseconds(non_temporal));
    return preference.non_temporal(kTimedPeerCopyBytes);
  };
  // Each call records the times of a pair of copies, in nanoseconds: with cached stores, and with
  // non-temporal stores. In this test, cached stores take 160 ns between chiplets, and 40 ns within
  // one.
  CachePreference preference;
  EXPECT_FALSE(record(preference, 160, 45));  // between chiplets
  EXPECT_FALSE(record(preference, 40, 45));   // an outlier
  EXPECT_FALSE(record(preference, 160, 45));
  EXPECT_TRUE(record(preference, 160, 45));
  for (int pair = 0; pair < 100; ++pair) EXPECT_TRUE(record(preference, 160, 45));
  EXPECT_TRUE(record(preference, 80, 45));  // a smaller difference: the choice stays
  EXPECT_TRUE(record(preference, 40, 45));  // an outlier
  EXPECT_TRUE(record(preference, 160, 45));
  EXPECT_TRUE(record(preference, 40, 45));  // within one chiplet
  EXPECT_FALSE(record(preference, 40, 45));
  for (int pair = 0; pair < 100; ++pair) EXPECT_FALSE(record(preference, 80, 45));
}

TEST(Copy, ShortCopiesNeedALargerDifference) {
  using std::chrono::nanoseconds;
  CachePreference preference;
  const auto record = [&](int cached, int non_temporal) {
    for (int pair = 0; pair < 2 * kAgreeingTrials; ++pair) {
      preference.record(nanoseconds(cached), nanoseconds(non_temporal));
    }
    return std::pair(preference.non_temporal(kTimedPeerCopyBytes - 1),
                     preference.non_temporal(kTimedPeerCopyBytes));
  };
  // The times are in ns, for 1 KiB.
  EXPECT_EQ(record(45, 40), std::pair(false, false));  // in one cluster
  EXPECT_EQ(record(140, 40), std::pair(false, true));  // in two clusters
  EXPECT_EQ(record(420, 40), std::pair(true, true));   // farther apart
  EXPECT_EQ(record(140, 40), std::pair(false, true));
}

TEST(Copy, UsesNonTemporalStoresFromHalfTheCache) {
  const std::filesystem::path caches =
      std::filesystem::path(testing::TempDir()) / ("caches-" + std::to_string(getpid()));
  EXPECT_EQ(non_temporal_bytes_of(caches),
            kNonTemporalFromAtMostBytes);  // no file gives the cache's size
  std::filesystem::create_directories(caches / "index3");
  const std::vector<std::pair<std::string, size_t>> cases = {
      {"16384K\n", size_t{8} << 20},
      {"32768K\n", kNonTemporalFromAtMostBytes},
      {"98304K\n", kNonTemporalFromAtMostBytes},
      {"\n", kNonTemporalFromAtMostBytes},
  };
  for (const auto& [size, bytes] : cases) {
    std::ofstream(caches / "index3" / "size") << size;
    EXPECT_EQ(non_temporal_bytes_of(caches), bytes) << size;
  }
  std::filesystem::remove_all(caches);
}

}  // namespace
}  // namespace hbm::kernels
