// Compares the buddy allocator with a model: a map of the allocated ranges.
#include "memory/buddy.h"
#include "seeds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace hbm::memory {
namespace {

constexpr uint64_t kUnit = 64;

struct Shape {
  uint64_t space;
  uint64_t largest;
};

// The allocated ranges, by offset. Finds out by search which ranges are free.
class Model {
 public:
  explicit Model(const Shape& shape) : shape_(shape) {}

  static uint64_t range_bytes(uint64_t bytes) { return std::bit_ceil(std::max(bytes, kUnit)); }

  bool is_free(uint64_t offset, uint64_t bytes) const {
    if (offset + bytes > shape_.space / kUnit * kUnit) return false;
    const auto next = taken_.lower_bound(offset);
    if (next != taken_.end() && next->first < offset + bytes) return false;
    if (next == taken_.begin()) return true;
    const auto& [begin, size] = *std::prev(next);
    return begin + size <= offset;
  }

  bool any_free(uint64_t bytes) const {
    for (uint64_t offset = 0; offset < shape_.space; offset += bytes) {
      if (is_free(offset, bytes)) return true;
    }
    return false;
  }

  uint64_t largest_free() const {
    for (uint64_t bytes = shape_.largest; bytes >= kUnit; bytes /= 2) {
      if (any_free(bytes)) return bytes;
    }
    return 0;
  }

  void take(uint64_t offset, uint64_t bytes) {
    taken_.emplace(offset, bytes);
    used_ += bytes;
  }

  uint64_t give_back(size_t index) {
    const auto range = std::next(taken_.begin(), static_cast<std::ptrdiff_t>(index));
    const uint64_t offset = range->first;
    used_ -= range->second;
    taken_.erase(range);
    return offset;
  }

  size_t count() const { return taken_.size(); }
  uint64_t used() const { return used_; }

 private:
  const Shape shape_;
  std::map<uint64_t, uint64_t> taken_;
  uint64_t used_ = 0;
};

class RandomBuddy : public testing::TestWithParam<Shape> {};

TEST_P(RandomBuddy, AgreesWithTheModel) {
  const Shape shape = GetParam();
  Buddy buddy(shape.space, kUnit, shape.largest);
  const uint64_t empty_free = buddy.free_bytes();
  const uint64_t empty_largest = buddy.largest_free_bytes();
  const double empty_fragmentation = buddy.fragmentation();
  EXPECT_EQ(empty_free, shape.space / kUnit * kUnit);
  Model model(shape);
  std::mt19937_64 random = test_random();
  for (int step = 0; step < 4000; ++step) {
    // Fills and empties the allocator in waves, so that it is nearly full at times, and nearly
    // empty at others.
    const bool filling = step / 300 % 2 == 0;
    if (model.count() == 0 || random() % 4 < (filling ? 3 : 1)) {
      const uint64_t bytes = random() % (2 * shape.largest >> (random() % 12));
      const auto offset = buddy.allocate(bytes);
      const uint64_t range = Model::range_bytes(bytes);
      if (!offset) {
        EXPECT_TRUE(range > shape.largest || !model.any_free(range)) << bytes;
        continue;
      }
      EXPECT_LE(range, shape.largest);
      EXPECT_EQ(*offset % range, 0u);
      ASSERT_TRUE(model.is_free(*offset, range)) << "overlap at " << *offset;
      model.take(*offset, range);
    } else {
      buddy.free(model.give_back(random() % model.count()));
    }
    ASSERT_EQ(empty_free - buddy.free_bytes(), model.used());
    ASSERT_EQ(buddy.largest_free_bytes(), model.largest_free());
    ASSERT_GE(buddy.fragmentation(), 0);
    ASSERT_LT(buddy.fragmentation(), 1);
  }
  while (model.count() != 0) buddy.free(model.give_back(random() % model.count()));
  EXPECT_EQ(buddy.free_bytes(), empty_free);
  EXPECT_EQ(buddy.largest_free_bytes(), empty_largest) << "all was merged";
  EXPECT_EQ(buddy.fragmentation(), empty_fragmentation);
}

INSTANTIATE_TEST_SUITE_P(Spaces, RandomBuddy,
                         testing::Values(Shape{1 << 16, 1 << 16}, Shape{1 << 16, 1 << 12},
                                         Shape{(1 << 16) - 1, 1 << 14}, Shape{5 << 13, 1 << 15},
                                         Shape{(1 << 15) + 7 * kUnit + 3, 1 << 15},
                                         Shape{3 * kUnit, 1 << 20}));

TEST(Buddy, ASpaceWithoutARangeIsExhausted) {
  for (uint64_t space : {uint64_t{0}, kUnit - 1}) {
    Buddy buddy(space, kUnit, 1 << 20);
    EXPECT_FALSE(buddy.allocate(1));
    EXPECT_EQ(buddy.largest_free_bytes(), 0u);
    EXPECT_EQ(buddy.fragmentation(), 0);
  }
}

TEST(Buddy, IsExhaustedByTheLastByte) {
  Buddy buddy(7 * kUnit, kUnit, 4 * kUnit);
  EXPECT_FALSE(buddy.allocate(4 * kUnit + 1)) << "past the largest";
  EXPECT_FALSE(buddy.allocate(~uint64_t{0}));
  std::vector<uint64_t> offsets;
  for (uint64_t bytes : {4 * kUnit, 2 * kUnit, uint64_t{0}}) {
    offsets.push_back(buddy.allocate(bytes).value());
  }
  EXPECT_EQ(offsets, (std::vector<uint64_t>{0, 4 * kUnit, 6 * kUnit}));
  EXPECT_FALSE(buddy.allocate(1));
  EXPECT_EQ(buddy.free_bytes(), 0u);
  EXPECT_EQ(buddy.fragmentation(), 0);
}

TEST(Buddy, UsesTheLowestOfTheSmallestFittingRanges) {
  Buddy buddy(8 * kUnit, kUnit, 8 * kUnit);
  std::vector<uint64_t> offsets;
  for (int i = 0; i < 8; ++i) offsets.push_back(buddy.allocate(kUnit).value());
  for (size_t i : {1u, 2u, 4u, 5u}) buddy.free(offsets[i]);
  EXPECT_EQ(buddy.allocate(1), 1 * kUnit) << "and not a half of the pair at 4";
  EXPECT_EQ(buddy.allocate(2 * kUnit), 4 * kUnit);
}

TEST(Buddy, ReportsFragmentation) {
  Buddy buddy(16 * kUnit, kUnit, 8 * kUnit);
  EXPECT_EQ(buddy.fragmentation(), 0);
  std::vector<uint64_t> offsets;
  for (int i = 0; i < 16; ++i) offsets.push_back(buddy.allocate(kUnit).value());
  for (size_t i = 0; i < 16; i += 2) buddy.free(offsets[i]);
  EXPECT_DOUBLE_EQ(buddy.fragmentation(), 1 - 1.0 / 8) << "half is free, by single units";
  EXPECT_EQ(buddy.largest_free_bytes(), kUnit);
  for (size_t i = 1; i < 8; i += 2) buddy.free(offsets[i]);
  EXPECT_DOUBLE_EQ(buddy.fragmentation(), 1 - (8 * 8 + 4 * 1) / 12.0 / 8);
  EXPECT_EQ(buddy.largest_free_bytes(), 8 * kUnit);
}

TEST(Buddy, ServesBlocksOf4KiBTo32GiB) {
  constexpr uint64_t kLargest = uint64_t{32} << 30;
  Buddy buddy(4 * kLargest, 4096, kLargest);
  const uint64_t small = buddy.allocate(1).value();
  std::vector<uint64_t> large;
  while (const auto offset = buddy.allocate(kLargest)) large.push_back(*offset);
  EXPECT_EQ(large.size(), 3u);
  buddy.free(small);
  EXPECT_EQ(buddy.allocate(kLargest), 0u);
}

}  // namespace
}  // namespace hbm::memory
