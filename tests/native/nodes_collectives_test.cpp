// Every collective, send and receive of groups that span several simulated nodes, over real MPI:
// random conversations in many layouts, against plain loops.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives_conversation.h"
#include "communicator/connect/connect.h"
#include "communicator/hierarchical/leader_operation.h"
#include "file_store.h"
#include "mpi_ranks.h"

namespace hbm {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

// A layout names each rank's node: "aab" is a node of ranks 0 and 1, and one of rank 2.
std::vector<std::vector<size_t>> nodes_of(const std::string& layout) {
  std::vector<std::vector<size_t>> nodes;
  std::map<char, size_t> index_of;
  for (size_t rank = 0; rank < layout.size(); ++rank) {
    const auto [node, added] = index_of.try_emplace(layout[rank], nodes.size());
    if (added) nodes.emplace_back();
    nodes[node->second].push_back(rank);
  }
  return nodes;
}

bool is_integer(Dtype dtype) { return dtype <= Dtype::kInt64; }
bool is_narrow(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat8E4M3FN;
}

// The ranks of each node in their order, then the nodes in theirs. Each stage rounds.
Bytes reduced_over(const std::string& layout, const std::vector<Bytes>& inputs, size_t count,
                   Dtype dtype, ReduceOp op) {
  const auto nodes = nodes_of(layout);
  const bool mean = op == ReduceOp::kAvg;
  const size_t ranks = inputs.size();
  if (nodes.size() == 1 || (mean && is_integer(dtype))) return in_order(inputs, count, dtype, op);
  const bool divide_first = mean && is_narrow(dtype) && nodes.size() < ranks;
  std::vector<Bytes> parts;
  for (const auto& members : nodes) {
    std::vector<Bytes> theirs;
    for (const size_t rank : members) theirs.push_back(inputs[rank]);
    const ReduceOp within = mean && !divide_first ? ReduceOp::kSum : op;
    parts.push_back(reduced(theirs, count, dtype, within, ranks));
  }
  return reduced(parts, count, dtype, divide_first ? ReduceOp::kSum : op, ranks);
}

// A group of the ranks of `layout`, and this rank's end of a conversation in it.
class NodesTalk {
 public:
  NodesTalk(const ForkedRank& rank, const std::string& name, const std::string& layout,
            uint64_t staging_bytes)
      : made_(connected(rank, name, staging_bytes)),
        ordered_(queue(OperationQueue::Order::kOrdered)),
        transfers_(queue(OperationQueue::Order::kUnordered)),
        conversation_(
            {.rank = rank.rank,
             .size = rank.size,
             .collectives = made_.communicator,
             .ordered = ordered_,
             .transfers = transfers_,
             .sequence = &sequence_,
             .sizes = {0, 1, 2, 13, 101, 1009, 4096, 20'011, 65'536, 96'000, 300'007, 600'011},
             .most_bytes = 700'000,
             .memory = {private_memory, shared_memory()},
             .reduced =
                 [layout](const std::vector<Bytes>& inputs, size_t count, Dtype dtype,
                          ReduceOp op) { return reduced_over(layout, inputs, count, dtype, op); }},
            static_cast<unsigned>(std::hash<std::string>()(layout + name))) {}
  ~NodesTalk() {
    ordered_->stop();
    transfers_->stop();
    made_.peers->stop();
  }

  Conversation* operator->() { return &conversation_; }
  Communicator& communicator() { return *made_.communicator; }

  uint64_t next() { return ++sequence_; }

  // Runs a collective to its end and returns its error.
  std::exception_ptr run(OperationPtr operation) {
    const auto ticket = ordered_->enqueue(std::move(operation), mpi::kPatience, {});
    ordered_->launch(ticket, Mode::kSync);
    return ticket->error();
  }

 private:
  static GroupConnection connected(const ForkedRank& rank, const std::string& name,
                                   uint64_t staging_bytes) {
    const auto folder = rank.directory / name;
    std::filesystem::create_directories(folder);
    const auto store = std::make_shared<FileStore>(folder);
    return connect({.store = store,
                    .job_store = store,
                    .global_ranks = {},
                    .heartbeat = mpi::kPatience,
                    .rank = rank.rank,
                    .size = rank.size,
                    .group = "group " + name,
                    .deadline = std::chrono::steady_clock::now() + mpi::kPatience,
                    .version = "test",
                    .parameter_server = "",
                    .policy = memory::Policy::kDdr,
                    .staging_bytes = staging_bytes});
  }

  std::shared_ptr<OperationQueue> queue(OperationQueue::Order order) const {
    const auto peers = made_.peers;
    return OperationQueue::create(
        order, made_.crowded,
        {[peers](const Operation& operation) { peers->check(operation); },
         [peers](const Operation& operation, const std::exception_ptr& error) {
           return peers->explain(operation, error);
         },
         [peers](const std::exception_ptr& error) { report(*peers, error); },
         [communicator = made_.communicator] { communicator->wake(); },
         [peers](const std::vector<int>& ranks) { return peers->list(ranks); }});
  }

  static void report(Peers& peers, const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& failure) {
      peers.report_failure(failure);
    }
  }

  Allocate shared_memory() const {
    return [segment = made_.segment](size_t bytes) {
      auto* const block = static_cast<std::byte*>(segment->allocate(bytes));
      return std::shared_ptr<std::byte>(block, [segment](std::byte* at) { segment->free(at); });
    };
  }

  GroupConnection made_;
  uint64_t sequence_ = 0;
  std::shared_ptr<OperationQueue> ordered_;
  std::shared_ptr<OperationQueue> transfers_;
  Conversation conversation_;
};

class NodesCollectives : public testing::TestWithParam<std::string> {};

// With little staging memory, chunks are of 4 KiB, and most operations take many blocks.
TEST_P(NodesCollectives, GiveWhatPlainLoopsGive) {
  const std::string layout = GetParam();
  if (kSlow && layout.size() > 4) GTEST_SKIP() << "no more threads in a rank than with fewer ranks";
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    setenv("HBMCOMM_NODE_ID", std::string(1, layout[static_cast<size_t>(rank.rank)]).c_str(), 1);
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

// Elements over the whole range of a type, so that a node's sum leaves it.
template <class Element>
std::vector<Element> any_elements(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Element> made(count);
  for (Element& one : made) one = static_cast<Element>(random());
  return made;
}

// The means of `count` elements over the ranks, whose elements `seed` tells.
template <class Element>
std::vector<Element> means(uint64_t seed, size_t ranks, size_t count) {
  std::vector<int64_t> sums(count);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto theirs = any_elements<Element>(count, seed + rank);
    for (size_t i = 0; i < count; ++i) sums[i] += theirs[i];
  }
  std::vector<Element> found;
  for (const int64_t sum : sums) {
    found.push_back(static_cast<Element>(sum / static_cast<int64_t>(ranks)));
  }
  return found;
}

// The reductions with AVG of `each` elements a rank, which go by leaders.
template <class Element>
void take_means(NodesTalk& talk, const ForkedRank& rank, Dtype dtype, size_t each, uint64_t seed) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(each) + ", seed " +
               std::to_string(seed));
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

class NodesMeans : public testing::TestWithParam<std::string> {};

TEST_P(NodesMeans, OfIntegersAreExactAndGoByLeaders) {
  const std::string layout = GetParam();
  const uint64_t seed = std::random_device{}();
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    setenv("HBMCOMM_NODE_ID", std::string(1, layout[static_cast<size_t>(rank.rank)]).c_str(), 1);
    NodesTalk talk(rank, "means", layout, uint64_t{256} << 10);
    for (const size_t each : {size_t{0}, size_t{1}, size_t{1'001}, size_t{40'013}}) {
      take_means<uint8_t>(talk, rank, Dtype::kUInt8, each, seed);
      take_means<int8_t>(talk, rank, Dtype::kInt8, each, seed);
      take_means<uint16_t>(talk, rank, Dtype::kUInt16, each, seed);
      take_means<int16_t>(talk, rank, Dtype::kInt16, each, seed);
      take_means<uint32_t>(talk, rank, Dtype::kUInt32, each, seed);
      take_means<int32_t>(talk, rank, Dtype::kInt32, each, seed);
    }
    talk->part();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, NodesMeans,
                         testing::Values("abc", "aabb", "abab", "aaab", "aaabb", "aabbcc"));

// What one rank does otherwise than the others, in a collective of float32 or int32.
struct Difference {
  const char* name;
  std::function<OperationPtr(Communicator&, std::byte* data, size_t ranks, bool differs)> call;
};

std::vector<Source> shares(const std::byte* data, size_t ranks, size_t count) {
  std::vector<Source> parts;
  for (size_t r = 0; r < ranks; ++r) parts.push_back({data + r * count * sizeof(float), count});
  return parts;
}
std::vector<Sink> rooms(std::byte* data, size_t ranks, size_t count) {
  std::vector<Sink> parts;
  for (size_t r = 0; r < ranks; ++r) parts.push_back({data + r * count * sizeof(float), count});
  return parts;
}

constexpr size_t kSome = 50'000;  // elements: several blocks
constexpr size_t kMore = 60'000;

const Difference kDifferences[] = {
    {"count",
     [](Communicator& group, std::byte* data, size_t, bool differs) {
       return group.allreduce(1, data, data, differs ? kMore : kSome, Dtype::kFloat32,
                              ReduceOp::kSum);
     }},
    {"type",
     [](Communicator& group, std::byte* data, size_t, bool differs) {
       return group.allreduce(1, data, data, kSome, differs ? Dtype::kInt32 : Dtype::kFloat32,
                              ReduceOp::kSum);
     }},
    {"operator",
     [](Communicator& group, std::byte* data, size_t, bool differs) {
       return group.allreduce(1, data, data, kSome, Dtype::kFloat32,
                              differs ? ReduceOp::kAvg : ReduceOp::kSum);
     }},
    {"root",
     [](Communicator& group, std::byte* data, size_t, bool differs) {
       return group.broadcast(1, data, kSome, Dtype::kFloat32, differs ? 1 : 0);
     }},
    {"count of allgather",
     [](Communicator& group, std::byte* data, size_t ranks, bool differs) {
       const size_t count = differs ? kMore : kSome;
       return group.allgather(1, {data, count}, rooms(data, ranks, count), Dtype::kFloat32);
     }},
    {"count of reduce_scatter",
     [](Communicator& group, std::byte* data, size_t ranks, bool differs) {
       return group.reduce_scatter(1, shares(data, ranks, differs ? kMore : kSome), data,
                                   Dtype::kFloat32, ReduceOp::kSum);
     }},
    {"operation",
     [](Communicator& group, std::byte* data, size_t, bool differs) {
       return differs ? group.barrier(1)
                      : group.allreduce(1, data, data, kSome, Dtype::kFloat32, ReduceOp::kSum);
     }},
};

bool tells_of_a_difference(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& failure) {
    return std::string(failure.what()).find("disagree") != std::string::npos;
  }
}

// Returns when all ranks have called it.
void part(const ForkedRank& rank) {
  FileStore store(rank.directory);
  const auto until = std::chrono::steady_clock::now() + mpi::kPatience;
  store.set("parts " + std::to_string(rank.rank), "", until);
  std::vector<std::string> all;
  for (int r = 0; r < rank.size; ++r) all.push_back("parts " + std::to_string(r));
  EXPECT_TRUE(await_keys(store, all, until));
}

// The last ranks, from `first` on, differ. A rank that only sends may have its error in the next
// collective.
void disagree(const Difference& difference, const std::string& layout, int first) {
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    SCOPED_TRACE(difference.name);
    setenv("HBMCOMM_NODE_ID", std::string(1, layout[static_cast<size_t>(rank.rank)]).c_str(), 1);
    NodesTalk talk(rank, "mismatch", layout, uint64_t{256} << 10);
    Communicator& group = talk.communicator();
    std::vector<std::byte> data(4 * kMore * sizeof(float));
    auto error = talk.run(difference.call(group, data.data(), layout.size(), rank.rank >= first));
    if (!error) error = talk.run(group.barrier(2));
    EXPECT_TRUE(error && tells_of_a_difference(error));
    part(rank);  // MPICH crashes in MPI_Isend to a process that has ended
  });
}

TEST(NodesMismatch, OfOneRankEndsWithAnErrorOnAll) {
  for (const Difference& difference : kDifferences) disagree(difference, "aabb", 3);
}

TEST(NodesMismatch, OfOneNodeEndsWithAnErrorOnAll) {
  for (const Difference& difference : kDifferences) disagree(difference, "aabb", 2);
}

// A broadcast of 512 KiB to three nodes goes along a chain, a smaller one does not.
TEST(NodesMismatch, InHowABroadcastGoesEndsWithAnErrorOnAll) {
  const auto broadcast = [](Communicator& group, std::byte* data, bool more) {
    return group.broadcast(1, data, more ? 200'000 : 100'000, Dtype::kFloat32, 0);
  };
  disagree(
      {"a shorter one on the last", [&](Communicator& group, std::byte* data, size_t,
                                        bool differs) { return broadcast(group, data, !differs); }},
      "abc", 2);
  disagree(
      {"a longer one on the last", [&](Communicator& group, std::byte* data, size_t,
                                       bool differs) { return broadcast(group, data, differs); }},
      "abc", 2);
}

// However much sockets take: a link's queue that overflows loses packets.
TEST(NodesBroadcast, ToANodeThatHasNotComeWaits) {
  setenv("UCX_TLS", "tcp,self", 1);
  mpi::run_ranks(2, [](const mpi::Rank& rank) {
    setenv("HBMCOMM_NODE_ID", rank.rank == 0 ? "a" : "b", 1);
    NodesTalk talk(rank, "early", "ab", uint64_t{64} << 20);
    FileStore store(rank.directory);
    const auto until = std::chrono::steady_clock::now() + mpi::kPatience;
    std::vector<float> data(100'000, rank.rank == 0 ? 1.0F : 0.0F);
    const auto broadcast = [&] {
      return talk.communicator().broadcast(talk.next(), data.data(), data.size(), Dtype::kFloat32,
                                           0);
    };
    EXPECT_FALSE(talk.run(broadcast()));
    if (rank.rank == 1) {
      EXPECT_TRUE(await_keys(store, {"waits"}, until));
      EXPECT_FALSE(talk.run(broadcast()));
      EXPECT_EQ(data.back(), 1.0F);
    } else {
      const auto operation = broadcast();
      operation->begin();
      const auto tried_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
      Progress progress = Progress::kIdle;
      while (progress != Progress::kDone && std::chrono::steady_clock::now() < tried_until) {
        progress = operation->poll();
      }
      EXPECT_NE(progress, Progress::kDone);
      store.set("waits", "", until);
      while (progress != Progress::kDone && std::chrono::steady_clock::now() < until) {
        progress = operation->poll();
      }
      EXPECT_EQ(progress, Progress::kDone);
    }
    part(rank);
  });
  unsetenv("UCX_TLS");
}

}  // namespace
}  // namespace hbm
