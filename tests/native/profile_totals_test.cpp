// The totals of the metrics: each operation counts once, under its key.
#include "process_group/profile_totals.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>

namespace hbm::process_group {
namespace {

ProfileTotals::Total one_call(const ProfileTotals::Key& key, int64_t nanoseconds) {
  return {.key = key,
          .calls = 1,
          .bytes = 10,
          .transit_ns = nanoseconds,
          .hidden_ns = 2,
          .waiting_ns = 1};
}

TEST(ProfileTotals, AddUpByKey) {
  ProfileTotals totals;
  ProfileTotals::Key key{.kind = "all_reduce", .limit = size_limit(1)};
  totals.add(one_call(key, 5));
  totals.add(one_call(key, 7));
  for (const auto change : {+[](ProfileTotals::Key& other) { other.kind = "barrier"; },
                            +[](ProfileTotals::Key& other) { other.limit = kNoLimit; },
                            +[](ProfileTotals::Key& other) { other.path = Path::kMpi; },
                            +[](ProfileTotals::Key& other) { other.staged = true; },
                            +[](ProfileTotals::Key& other) { other.zero_copy = true; },
                            +[](ProfileTotals::Key& other) { other.last_rank = 0; }}) {
    ProfileTotals::Key other = key;
    change(other);
    totals.add(one_call(other, 1));
  }
  ASSERT_EQ(totals.totals().size(), 7u);
  for (const ProfileTotals::Total& total : totals.totals()) {
    const uint64_t calls = total.key == key ? 2 : 1;
    EXPECT_EQ(total.calls, calls);
    EXPECT_EQ(total.bytes, 10 * calls);
    EXPECT_EQ(total.transit_ns, total.key == key ? 12 : 1);
    EXPECT_EQ(total.hidden_ns, static_cast<int64_t>(2 * calls));
    EXPECT_EQ(total.waiting_ns, static_cast<int64_t>(calls));
  }
}

TEST(ProfileTotals, ClassesOfSizesEndAtTheirLimits) {
  EXPECT_EQ(size_limit(0), 4u << 10);
  uint64_t least = 1;
  for (const uint64_t limit : kSizeLimits) {
    EXPECT_EQ(size_limit(least), limit);
    EXPECT_EQ(size_limit(limit), limit);
    least = limit + 1;
  }
  EXPECT_EQ(size_limit(least), kNoLimit);
  EXPECT_EQ(size_limit(UINT64_MAX), kNoLimit);
}

TEST(ProfileTotals, AreBounded) {
  ProfileTotals totals;
  const ProfileTotals::Total* const memory = totals.totals().data();
  const int many = static_cast<int>(kMostTotals) + 3;
  for (int rank = many; rank > 0; --rank) totals.add(one_call({.last_rank = rank}, 1));
  for (int rank = many; rank > 0; --rank) totals.add(one_call({.last_rank = rank}, 1));
  totals.leave_out();
  EXPECT_EQ(totals.totals().size(), kMostTotals);
  EXPECT_EQ(totals.totals().data(), memory);  // nothing was allocated
  EXPECT_EQ(totals.uncounted(), 7u);
  const uint64_t calls = std::accumulate(
      totals.totals().begin(), totals.totals().end(), uint64_t{0},
      [](uint64_t sum, const ProfileTotals::Total& total) { return sum + total.calls; });
  EXPECT_EQ(calls, 2 * kMostTotals);
}

}  // namespace
}  // namespace hbm::process_group
