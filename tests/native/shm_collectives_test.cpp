// Every collective, send and receive over shared memory: random conversations of 1 to 64 ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collectives_conversation.h"
#include "communicator/shm/control_region.h"
#include "communicator/shm/phased_operation.h"
#include "kernels/tuning.h"
#include "seeds.h"
#include "shm_ranks.h"
#include "stress.h"

namespace hbm::communicator::shm {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kPace = 4;
#else
constexpr size_t kPace = 1;
#endif

struct Shape {
  int size;
  size_t chunk_bytes;
  size_t operations;
  size_t threads = 1;  // if more than 1, messages are so large that threads share them
};

std::vector<size_t> sizes_worth_trying(size_t chunk) {
  std::vector<size_t> sizes = {0, 1, 2, 8, 13, 101, 1009, 4099, 20011};
  for (const size_t edge :
       {chunk, 3 * chunk, kZeroCopyBytes, kZeroCopyReductionBytes, Cell::kInlineBytes,
        size_t{128} * 1024, size_t{256} * 1024, 2 * kZeroCopyBytes}) {
    for (const size_t bytes : {edge - 1, edge, edge + 1}) sizes.push_back(bytes);
  }
  return sizes;
}

Speaker speaker(NodeRank& rank) {
  const auto in_segment = [segment = rank.segment](size_t bytes) {
    return std::shared_ptr<std::byte>(segment->allocate(bytes),
                                      [segment](std::byte* block) { segment->free(block); });
  };
  const bool large = rank.node.options.threads > 1;
  return {.rank = rank.rank,
          .size = rank.size,
          .collectives = rank.collectives,
          .ordered = rank.ordered,
          .transfers = rank.transfers,
          .sequence = &rank.sequence,
          .sizes = large ? std::vector{size_t{13}, 2 * kernels::kBytesPerReduceThread,
                                       4 * kernels::kBytesPerReduceThread + 13}
                         : sizes_worth_trying(rank.node.options.chunk_bytes),
          .most_bytes = large ? 9 * kernels::kBytesPerReduceThread
                              : size_t{rank.size > 8 ? 64u : 700u} * 1024,
          .memory = {in_segment, private_memory}};
}

void converse(const Shape& shape) {
  const uint64_t seed = test_seed();
  TestNode node({.size = shape.size,
                 .chunk_bytes = shape.chunk_bytes,
                 .segment_bytes = size_t{shape.size > 8      ? 8u
                                         : shape.threads > 1 ? 512u
                                                             : 64u}
                                  << 20,
                 .threads = shape.threads});
  const size_t before = node.segments[0]->blocks();
  node.run([&](NodeRank& rank) {
    Conversation conversation(speaker(rank), seed);
    conversation.say_each_once();
    conversation.say(shape.operations / kPace);
    conversation.part();
  });
  for (const auto& segment : node.segments) EXPECT_EQ(segment->blocks(), before);
}

class NodeCollectives : public testing::TestWithParam<Shape> {};

TEST_P(NodeCollectives, MatchPlainLoops) {
  for (int i = 0; i < 2; ++i) converse(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Shapes, NodeCollectives,
                         testing::Values(Shape{1, 4096, 60}, Shape{2, 512, 250},
                                         Shape{2, 96 * 1024, 250}, Shape{3, 4096, 200},
                                         Shape{4, 64 * 1024, 150}, Shape{4, 256 * 1024, 60},
                                         Shape{5, 1024, 100}, Shape{8, 8192, 80},
                                         Shape{64, 512, 10}, Shape{2, 64 * 1024, 20, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.size) + "_ranks_chunks_of_" +
                                  std::to_string(info.param.chunk_bytes) +
                                  (info.param.threads > 1 ? "_with_threads" : "");
                         });

// Returns the number of phases that two ranks need: for a gather of `bytes` from each rank, or for
// an alltoall in which each transfer has `bytes`.
uint64_t phases(size_t chunk_bytes, size_t bytes, OpCode op) {
  TestNode node({.size = 2, .chunk_bytes = chunk_bytes, .segment_bytes = 1 << 20});
  node.run([&](NodeRank& rank) {
    std::vector<char> in(2 * bytes, static_cast<char>(rank.rank + 1)), out(2 * bytes);
    const std::vector<Source> sources = {{in.data(), bytes}, {in.data() + bytes, bytes}};
    const std::vector<Sink> sinks = {{out.data(), bytes}, {out.data() + bytes, bytes}};
    const bool gathers = op == OpCode::kGather;
    const bool receives = !gathers || rank.rank == 0;
    EXPECT_FALSE(rank.run(gathers ? rank.collectives->gather(1, sources[0],
                                                             receives ? sinks : std::vector<Sink>{},
                                                             Dtype::kInt8, 0)
                                  : rank.collectives->alltoall(1, sources, sinks, Dtype::kInt8)));
    const std::vector<char> expected = {1, 2};
    if (!receives) return;
    EXPECT_EQ((std::vector<char>{out[bytes - 1], out[bytes]}), expected);
  });
  const RegionLayout layout(2, chunk_bytes);
  const auto published = [&](size_t slot) {
    return reinterpret_cast<const Slot*>(node.regions[0] + slot)->phase.load();
  };
  return std::max(published(layout.slot), published(layout.slot + layout.slot_stride));
}

TEST(PeerTransfers, GoInAsFewChunksAsTheSlotAndTheCacheAllow) {
  constexpr size_t kKiB = 1024;
  constexpr size_t kMiB = 1024 * kKiB;
  EXPECT_EQ(phases(128 * kKiB, 128 * kKiB, OpCode::kGather), 1u);
  EXPECT_EQ(phases(128 * kKiB, 512 * kKiB, OpCode::kGather), 2u);
  EXPECT_EQ(phases(128 * kKiB, 2 * kMiB, OpCode::kGather), 4u);
  EXPECT_EQ(phases(128 * kKiB, 2 * kMiB, OpCode::kAlltoall), 4u);
  EXPECT_EQ(phases(4 * kKiB, 2 * kMiB, OpCode::kGather), 128u);
  EXPECT_EQ(phases(kMiB, 2 * kMiB, OpCode::kGather), 2u);
  EXPECT_EQ(phases(128 * kKiB, 8 * kMiB, OpCode::kGather), 64u);
  EXPECT_EQ(phases(128 * kKiB, 4 * kMiB, OpCode::kAlltoall), 32u);
}

// In an alltoall, a rank also copies the data that it has for itself: a part while it waits for
// others, and the rest at the end. The copy is right whichever rank is late.
TEST(PeerTransfers, CopyWhatIsForTheRankItselfWhoeverIsLate) {
  constexpr size_t kBytes = (size_t{5} << 20) / 2 + 13;
  for (int late = 0; late < 3; ++late) {
    TestNode node({.size = 3, .chunk_bytes = 128 << 10, .segment_bytes = 64 << 20});
    const uint64_t seed = test_seed();
    SCOPED_TRACE("rank " + std::to_string(late) + " late");
    // Returns the data from rank `from` for rank `to`.
    const auto part = [seed](int from, int to) {
      std::mt19937_64 random(seed + static_cast<uint64_t>(3 * from + to));
      std::vector<char> bytes(kBytes);
      std::ranges::generate(bytes, [&] { return static_cast<char>(random()); });
      return bytes;
    };
    node.run([&](NodeRank& rank) {
      std::vector<std::vector<char>> in, out(3, std::vector<char>(kBytes));
      std::vector<Source> sources;
      std::vector<Sink> sinks;
      for (int to = 0; to < 3; ++to) in.push_back(part(rank.rank, to));
      for (const auto& bytes : in) sources.push_back({bytes.data(), kBytes});
      for (auto& bytes : out) sinks.push_back({bytes.data(), kBytes});
      if (rank.rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_FALSE(rank.run(rank.collectives->alltoall(1, sources, sinks, Dtype::kInt8)));
      for (int from = 0; from < 3; ++from) EXPECT_TRUE(out[from] == part(from, rank.rank)) << from;
      if (rank.rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const bool root = rank.rank == 0;
      EXPECT_FALSE(rank.run(rank.collectives->gather(
          2, sources[0], root ? sinks : std::vector<Sink>{}, Dtype::kInt8, 0)));
      for (int from = 0; root && from < 3; ++from) EXPECT_TRUE(out[from] == part(from, 0)) << from;
    });
  }
}

TEST(PeerTransfers, CopyWhatIsForTheRankItselfWhileItWaits) {
  constexpr size_t kBytes = size_t{3} << 20;
  TestNode node({.size = 2, .chunk_bytes = 128 << 10, .segment_bytes = 64 << 20});
  std::atomic<bool> copied{false};
  node.run([&](NodeRank& rank) {
    const std::vector<char> in(kBytes, static_cast<char>(rank.rank + 1));
    std::vector<std::vector<char>> out(2, std::vector<char>(kBytes));
    const std::vector<Sink> sinks = {{out[0].data(), kBytes}, {out[1].data(), kBytes}};
    const auto operation = rank.collectives->allgather(1, {in.data(), kBytes}, sinks, Dtype::kInt8);
    if (rank.rank == 1) {
      while (!copied.load()) std::this_thread::yield();
    }
    operation->begin();
    if (rank.rank == 0) {
      while (operation->poll() == progress::Progress::kActive) continue;
      EXPECT_TRUE(out[0] == in);
      copied.store(true);
    }
    while (operation->poll() != progress::Progress::kDone) std::this_thread::yield();
    for (int from = 0; from < 2; ++from) {
      EXPECT_TRUE(out[from] == std::vector<char>(kBytes, static_cast<char>(from + 1))) << from;
    }
  });
}

// With 4 ranks and chunks of 16 bytes, a rank's share of two chunks has 8 bytes. So it is smaller
// than the inline data of a slot (16 bytes). This also occurs on nodes with hundreds of ranks.
TEST(NodeReduction, OfInlineDataIsOneShotWithAnyChunk) {
  TestNode node({.size = 4, .chunk_bytes = 16, .segment_bytes = 1 << 20});
  node.run([&](NodeRank& rank) {
    for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
      std::vector<double> data = {1.0 + rank.rank, 10.0 * static_cast<double>(sequence)};
      EXPECT_FALSE(rank.run(rank.collectives->allreduce(sequence, data.data(), data.data(), 2,
                                                        Dtype::kFloat64, ReduceOp::kSum)));
      EXPECT_EQ(data, (std::vector<double>{10, 40.0 * static_cast<double>(sequence)}));
    }
  });
}

// HBM_STRESS_SECONDS=600 talks for ten minutes.
TEST(NodeStress, RunsForTheGivenTime) {
  const int seconds = stress("HBM_STRESS_SECONDS", 0);
  if (seconds == 0) GTEST_SKIP() << "HBM_STRESS_SECONDS is not set";
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  const std::vector<Shape> shapes = {{2, 64 * 1024, 500}, {3, 512, 500},  {4, 4096, 500},
                                     {8, 1024, 200},      {13, 512, 100}, {64, 256, 10}};
  for (size_t i = 0; Clock::now() < end && !HasFailure(); ++i) {
    SCOPED_TRACE("conversation " + std::to_string(i));
    converse(shapes[i % shapes.size()]);
  }
}

}  // namespace
}  // namespace hbm::communicator::shm
