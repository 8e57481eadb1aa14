// A ShmGroup: its checks of control regions and addresses, the release of its regions, and
// wake-ups.
#include "communicator/shm/shm_group.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

TEST(NodeTeam, ReleasesRegionsWhenAllOthersHaveLeft) {
  TestNode node({.size = 3});
  const auto released = [&node] { return ShmGroup::released(node.regions[0], 3); };
  auto first = std::make_unique<NodeRank>(node, 0);
  auto second = std::make_unique<NodeRank>(node, 1);
  auto third = std::make_unique<NodeRank>(node, 2);
  EXPECT_FALSE(released());
  first.reset();
  third.reset();
  EXPECT_FALSE(released());
  second.reset();
  EXPECT_TRUE(released());
}

TEST(NodeTeam, RefusesARegionWithAnotherLayout) {
  TestNode node({.size = 2, .chunk_bytes = 8192});
  format_region(node.regions[1], RegionLayout(2, 4096));
  expect_error(ErrorKind::kMismatch, {"rank 1 of the test's group", "same staging_bytes"},
               [&] { NodeRank rank(node, 0); });
}

TEST(NodeTeam, RefusesAddressesBeyondASegment) {
  TestNode node({.size = 2});
  const NodeRank rank(node, 0);
  const size_t size = node.segments[1]->size();
  EXPECT_EQ(rank.shm_group->address_in_segment(1, size - 64, 64),
            node.segments[1]->base() + size - 64);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, size_t>>{
           {size - 63, 64}, {size + 1, 0}, {~uint64_t{0}, 64}, {0, size + 1}}) {
    expect_error(ErrorKind::kMismatch, {"rank 1 of the test's group", "of its shared segment"},
                 [&] { rank.shm_group->address_in_segment(1, offset, bytes); });
  }
}

TEST(NodeTeam, FindsAddressesInItsOwnSegment) {
  TestNode node({.size = 1});
  const NodeRank rank(node, 0);
  const TestSegment& own = *node.segments[0];
  EXPECT_EQ(rank.shm_group->offset_in_segment(own.base() + 100, 28), 100u);
  EXPECT_EQ(rank.shm_group->offset_in_segment(own.base(), own.size()), 0u);
  EXPECT_FALSE(rank.shm_group->offset_in_segment(own.base() + 1, own.size()));
  EXPECT_FALSE(rank.shm_group->offset_in_segment(own.base() - 1, 1));
  const int elsewhere = 0;
  EXPECT_FALSE(rank.shm_group->offset_in_segment(&elsewhere, sizeof elsewhere));
}

Doorbell& doorbell(const TestNode& node, size_t rank) {
  return reinterpret_cast<Control*>(node.regions[rank])->collectives;
}

TEST(NodeTeam, OnlyTheLastPublisherWakesSleepers) {
  TestNode node({.size = 3});
  NodeRank first(node, 0);
  NodeRank second(node, 1);
  NodeRank last(node, 2);
  first.shm_group->publish();
  std::thread sleeper([&first] {
    while (!first.shm_group->all_here()) first.shm_group->sleep(Clock::now() + kTimeout, 0);
  });
  while (doorbell(node, 0).asleep.load() == 0) std::this_thread::yield();
  second.shm_group->publish();
  EXPECT_EQ(doorbell(node, 0).bell.load(), 0u);
  last.shm_group->publish();
  sleeper.join();
  EXPECT_EQ(doorbell(node, 0).bell.load(), 1u);
  EXPECT_EQ(doorbell(node, 1).bell.load(), 0u);  // rank 1 is not asleep, so its bell does not ring
}

}  // namespace
}  // namespace hbm::communicator::shm
