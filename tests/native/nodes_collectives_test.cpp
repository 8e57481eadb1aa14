// Every collective, send and receive of groups that span several simulated nodes, over real MPI:
// random conversations in many layouts, against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "communicator/hierarchical/leader_operation.h"
#include "nodes_talk.h"
#include "seeds.h"

namespace hbm::communicator {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

class NodesCollectives : public testing::TestWithParam<std::string> {};

// With little staging memory, chunks are of 4 KiB, and most operations take many blocks.
TEST_P(NodesCollectives, MatchPlainLoops) {
  const std::string layout = GetParam();
  if (kSlow && layout.size() > 4) GTEST_SKIP() << "no more threads in a rank than with fewer ranks";
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    for (const uint64_t staging_bytes : {uint64_t{256} << 10, uint64_t{64} << 20}) {
      NodesTalk talk(rank, "staging" + std::to_string(staging_bytes), layout, staging_bytes);
      talk->say_each_once();
      talk->say(layout.size() > 4 || kSlow ? 20 : 60);
      talk->part();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, NodesCollectives,
                         testing::Values("ab", "abc", "aab", "aabb", "abab", "aaab", "abbb", "abcc",
                                         "aaabb", "abcabc", "aabbccdd", "abcdefgh"));

// Returns random elements over the whole range of a type, so that sums of a node's elements are
// often outside of the range.
template <class Element>
std::vector<Element> any_elements(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Element> made(count);
  for (Element& one : made) one = static_cast<Element>(random());
  return made;
}

// Returns the mean over the ranks of each of `count` elements. Rank r draws its elements from the
// seed `seed` + r.
template <class Element>
std::vector<Element> means(uint64_t seed, size_t ranks, size_t count) {
  std::vector<__int128> sums(count);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto theirs = any_elements<Element>(count, seed + rank);
    for (size_t i = 0; i < count; ++i) sums[i] += theirs[i];
  }
  std::vector<Element> found;
  for (const __int128 sum : sums) {
    found.push_back(static_cast<Element>(sum / static_cast<__int128>(ranks)));
  }
  return found;
}

// Runs allreduce, reduce and reduce_scatter with AVG, in which leaders add the sums of their nodes.
// Each rank's share of the reduce_scatter has `each` elements.
template <class Element>
void take_means(NodesTalk& talk, const ForkedRank& rank, Dtype dtype, size_t each, uint64_t seed) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(each));
  const auto ranks = static_cast<size_t>(rank.size);
  const size_t count = each * ranks;
  const auto data = any_elements<Element>(count, seed + static_cast<size_t>(rank.rank));
  const std::vector<Element> expected = means<Element>(seed, ranks, count);
  const int root = static_cast<int>(seed % ranks);
  std::vector<Source> inputs;
  for (size_t r = 0; r < ranks; ++r) inputs.push_back({data.data() + r * each, each});
  Communicator& group = talk.communicator();
  const auto run = [&](OperationPtr operation) {
    EXPECT_NE(dynamic_cast<hierarchical::LeaderOperation*>(operation.get()), nullptr);
    if (const auto error = talk.run(std::move(operation))) std::rethrow_exception(error);
  };

  std::vector<Element> in_place = data;
  run(group.allreduce(talk.next(), in_place.data(), in_place.data(), count, dtype, ReduceOp::kAvg));
  EXPECT_EQ(in_place, expected);
  std::vector<Element> all(count);
  run(group.reduce(talk.next(), data.data(), all.data(), count, dtype, ReduceOp::kAvg, root));
  if (rank.rank == root) {
    EXPECT_EQ(all, expected);
  }
  std::vector<Element> share(each);
  run(group.reduce_scatter(talk.next(), inputs, share.data(), dtype, ReduceOp::kAvg));
  const auto own = expected.begin() + static_cast<std::ptrdiff_t>(each) * rank.rank;
  EXPECT_EQ(share, std::vector<Element>(own, own + static_cast<std::ptrdiff_t>(each)));
}

// Ranks 0 and 1 share a node, rank 2 is alone. Rank 0 leads its node.
TEST(NodesObservation, HasTheDataOfEachRank) {
  mpi::run_ranks(3, [&](const mpi::Rank& rank) {
    NodesTalk talk(rank, "observed", "aab", uint64_t{64} << 20);
    const size_t count = 300'000;
    bool in_segment = false;
    for (const Allocate& allocate : talk.kinds_of_memory()) {
      const auto memory = allocate(count * sizeof(float));
      auto* const data = reinterpret_cast<float*>(memory.get());
      std::fill_n(data, count, 1.0F);
      const progress::Observation found = talk.observed(talk.communicator().allreduce(
          talk.next(), data, data, count, Dtype::kFloat32, ReduceOp::kSum));
      const bool has_local_peer = rank.rank < 2;
      EXPECT_EQ(found.zero_copy, in_segment && has_local_peer);
      EXPECT_TRUE(found.staged || (in_segment && rank.rank == 1));
      in_segment = true;
    }
    const progress::Observation barrier = talk.observed(talk.communicator().barrier(talk.next()));
    EXPECT_FALSE(barrier.staged || barrier.zero_copy);
    talk->part();
  });
}

class NodesMeans : public testing::TestWithParam<std::string> {};

TEST_P(NodesMeans, OfIntegersAreExactAndUseLeaders) {
  const std::string layout = GetParam();
  const uint64_t seed = test_seed();
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    NodesTalk talk(rank, "means", layout, uint64_t{256} << 10);
    for (const size_t each : {size_t{0}, size_t{1}, size_t{1'001}, size_t{40'013}}) {
      take_means<uint8_t>(talk, rank, Dtype::kUInt8, each, seed);
      take_means<int8_t>(talk, rank, Dtype::kInt8, each, seed);
      take_means<uint16_t>(talk, rank, Dtype::kUInt16, each, seed);
      take_means<int16_t>(talk, rank, Dtype::kInt16, each, seed);
      take_means<uint32_t>(talk, rank, Dtype::kUInt32, each, seed);
      take_means<int32_t>(talk, rank, Dtype::kInt32, each, seed);
      take_means<uint64_t>(talk, rank, Dtype::kUInt64, each, seed);
      take_means<int64_t>(talk, rank, Dtype::kInt64, each, seed);
    }
    talk->part();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, NodesMeans,
                         testing::Values("abc", "aabb", "abab", "aaab", "aaabb", "aabbcc"));

// In a broadcast of more than 64 KiB between two nodes, the receiving node answers each block.
TEST(NodesBroadcast, IsCorrectAroundTheAnswerLimit) {
  for (const std::string layout : {"ab", "aabb"}) {
    mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
      NodesTalk talk(rank, "limit", layout, uint64_t{64} << 20);
      for (const size_t bytes : {65'535, 65'536, 65'537, 131'072, 262'147, 1'048'579}) {
        for (int root = 0; root < rank.size; ++root) {
          SCOPED_TRACE(std::to_string(bytes) + " bytes from rank " + std::to_string(root));
          const Bytes expected = pattern(bytes + static_cast<size_t>(root), bytes, Dtype::kUInt8);
          const Tensor tensor(private_memory, bytes, Dtype::kUInt8, 1);
          if (rank.rank == root) tensor.set(expected);
          EXPECT_FALSE(talk.run(talk.communicator().broadcast(talk.next(), tensor.data(), bytes,
                                                              Dtype::kUInt8, root)));
          EXPECT_TRUE(tensor.holds(expected));
        }
      }
      talk->part();
    });
  }
}

// Rank 0, the root, does not send all data before rank 1 has come to the broadcast, although the
// sockets would take them. Early data could overflow the queue of a link, which then loses packets.
TEST(NodesBroadcast, ToANodeThatHasNotComeWaits) {
  setenv("UCX_TLS", "tcp,self", 1);
  mpi::run_ranks(2, [](const mpi::Rank& rank) {
    NodesTalk talk(rank, "early", "ab", uint64_t{64} << 20);
    FileStore store(rank.directory);
    const auto until = std::chrono::steady_clock::now() + mpi::kTimeout;
    std::vector<float> data(100'000, rank.rank == 0 ? 1.0F : 0.0F);
    const auto broadcast = [&] {
      return talk.communicator().broadcast(talk.next(), data.data(), data.size(), Dtype::kFloat32,
                                           0);
    };
    EXPECT_FALSE(talk.run(broadcast()));
    if (rank.rank == 1) {
      EXPECT_TRUE(bootstrap::await_keys(store, {"waits"}, until));
      EXPECT_FALSE(talk.run(broadcast()));
      EXPECT_EQ(data.back(), 1.0F);
    } else {
      const auto operation = broadcast();
      operation->begin();
      const auto tried_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
      progress::Progress progress = progress::Progress::kIdle;
      while (progress != progress::Progress::kDone &&
             std::chrono::steady_clock::now() < tried_until) {
        progress = operation->poll();
      }
      EXPECT_NE(progress, progress::Progress::kDone);
      store.set("waits", "", until);
      while (progress != progress::Progress::kDone && std::chrono::steady_clock::now() < until) {
        progress = operation->poll();
      }
      EXPECT_EQ(progress, progress::Progress::kDone);
    }
    part(rank);
  });
  unsetenv("UCX_TLS");
}

}  // namespace
}  // namespace hbm::communicator
