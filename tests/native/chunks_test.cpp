// Chunks of a device's collectives: they cover each element once, and are equal on all ranks.
#include "process_group/chunks.h"
#include "seeds.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace hbm::process_group {
namespace {

TEST(Chunks, SmallTransfersAreOneChunk) {
  const Chunks chunks({1000}, 4, 2001);
  EXPECT_EQ(chunks.number(), 1u);
  EXPECT_EQ(chunks.range(0).offset, 0u);
  EXPECT_EQ(chunks.range(0).count, SIZE_MAX);
  EXPECT_EQ(chunks.sequence(7).whole, 0u);
  EXPECT_EQ(chunks.parts(500, 0).size(), 1u);
  EXPECT_EQ(chunks.parts(500, 0)[0].count, 500u);
}

TEST(Chunks, UnequalTransfersAreOneChunk) { EXPECT_EQ(Chunks({0, 4}, 4, 4096).number(), 1u); }

TEST(Chunks, LargeTransfersAreCut) {
  const Chunks chunks({2500}, 4, 4096);
  EXPECT_EQ(chunks.number(), 2u);
  EXPECT_EQ(chunks.range(0).count, 1264u);  // whole cache lines
  EXPECT_EQ(chunks.range(1).offset, 1264u);
  EXPECT_EQ(chunks.range(1).count, 1236u);
  EXPECT_EQ(chunks.sequence(7).number, 7u);
  EXPECT_EQ(chunks.sequence(7).whole, 2500u);
}

TEST(Chunks, PartsOfEveryStream) {
  const Chunks chunks({1024, 3}, 4, 4096);
  ASSERT_EQ(chunks.number(), 3u);
  const auto pieces = chunks.parts(3072, 2);
  ASSERT_EQ(pieces.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(pieces[i].offset, i * 1024 + chunks.range(2).offset);
    EXPECT_EQ(pieces[i].count, chunks.range(2).count);
  }
}

TEST(Chunks, EveryElementOnce) {
  std::mt19937_64 random = test_random();
  const auto between = [&random](size_t least, size_t most) {
    return least + random() % (most - least + 1);
  };
  for (int round = 0; round < 300; ++round) {
    const size_t element = size_t{1} << between(0, 4);
    const size_t streams = between(1, 5);
    const size_t count = between(0, 20'000);
    const size_t bytes = between(64, 100'000);
    SCOPED_TRACE(testing::Message()
                 << streams << " of " << count << " x " << element << " by " << bytes);
    const Chunks chunks({count, streams}, element, bytes);
    std::vector<int> seen(count * streams);
    for (size_t index = 0; index < chunks.number(); ++index) {
      for (const auto& [offset, length] : chunks.parts(seen.size(), index)) {
        EXPECT_TRUE(length > 0 || count == 0);
        for (size_t i = 0; i < length; ++i) ++seen.at(offset + i);
      }
    }
    for (const int times : seen) ASSERT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace hbm::process_group
