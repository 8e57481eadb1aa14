// Groups that span several simulated nodes, over real MPI, when their ranks disagree.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "expect_error.h"
#include "nodes_talk.h"

namespace hbm::communicator {
namespace {

// A way in which a rank's collective may differ from the other ranks' collective. `call` makes the
// different collective if `differs` is true.
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

constexpr size_t kSome = 50'000;  // elements; they take several blocks
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
  return text_of(error).find("disagree") != std::string::npos;
}

// The ranks from `first` on make the different collective. Every rank must get an error; a rank
// that only sends may get it only in the next collective.
void disagree(const Difference& difference, const std::string& layout, int first) {
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    SCOPED_TRACE(difference.name);
    NodesTalk talk(rank, "mismatch", layout, uint64_t{256} << 10);
    Communicator& group = talk.communicator();
    std::vector<std::byte> data(4 * kMore * sizeof(float));
    auto error = talk.run(difference.call(group, data.data(), layout.size(), rank.rank >= first));
    if (!error) error = talk.run(group.barrier(2));
    EXPECT_TRUE(tells_of_a_difference(error)) << text_of(error);
    part(rank);  // MPICH crashes in MPI_Isend to a process that has ended
  });
}

TEST(NodesMismatch, OfOneRankFailsOnAllRanks) {
  for (const Difference& difference : kDifferences) disagree(difference, "aabb", 3);
}

TEST(NodesMismatch, OfOneNodeFailsOnAllRanks) {
  for (const Difference& difference : kDifferences) disagree(difference, "aabb", 2);
}

// From 512 KiB on, a broadcast among three nodes goes along a chain of nodes. Below 512 KiB, the
// root's node sends to each other node.
TEST(NodesMismatch, OfBroadcastAlgorithmsFailsOnAllRanks) {
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

// Makes a collective with a root, of `count` elements to or from each rank. `roots`: this rank
// takes itself for the root.
using Rooted = std::function<OperationPtr(Communicator&, uint64_t sequence, std::byte* data,
                                          size_t ranks, size_t count, int root, bool roots)>;

const std::map<std::string, Rooted> kRooted = {
    {"broadcast",
     [](Communicator& group, uint64_t sequence, std::byte* data, size_t, size_t count, int root,
        bool) { return group.broadcast(sequence, data, count, Dtype::kFloat32, root); }},
    {"reduce",
     [](Communicator& group, uint64_t sequence, std::byte* data, size_t, size_t count, int root,
        bool) {
       return group.reduce(sequence, data, data, count, Dtype::kFloat32, ReduceOp::kSum, root);
     }},
    {"gather",
     [](Communicator& group, uint64_t sequence, std::byte* data, size_t ranks, size_t count,
        int root, bool roots) {
       const auto outputs = roots ? rooms(data, ranks, count) : std::vector<Sink>{};
       return group.gather(sequence, {data, count}, outputs, Dtype::kFloat32, root);
     }},
    {"scatter",
     [](Communicator& group, uint64_t sequence, std::byte* data, size_t ranks, size_t count,
        int root, bool roots) {
       const auto inputs = roots ? shares(data, ranks, count) : std::vector<Source>{};
       return group.scatter(sequence, inputs, {data, count}, Dtype::kFloat32, root);
     }},
};

// A rank of a group whose ranks disagree about the root of a collective. The last rank names itself
// as the root; the other ranks name rank 0.
class RootsTalk {
 public:
  RootsTalk(const ForkedRank& rank, const std::string& layout, const std::string& name,
            size_t count)
      : rank_(rank),
        name_(name),
        count_(count),
        talk_(rank, name + std::to_string(count), layout, uint64_t{256} << 10),
        data_(layout.size() * count * sizeof(float)) {}

  std::exception_ptr disagree(std::chrono::milliseconds timeout = mpi::kTimeout) {
    return run(rank_.rank == rank_.size - 1 ? rank_.rank : 0, timeout);
  }
  std::exception_ptr barrier() { return talk_.run(talk_.communicator().barrier(talk_.next())); }

 private:
  std::exception_ptr run(int root, std::chrono::milliseconds timeout) {
    const auto ranks = static_cast<size_t>(rank_.size);
    return talk_.run(kRooted.at(name_)(talk_.communicator(), talk_.next(), data_.data(), ranks,
                                       count_, root, rank_.rank == root),
                     timeout);
  }

  const ForkedRank rank_;
  const std::string name_;
  const size_t count_;
  NodesTalk talk_;
  std::vector<std::byte> data_;
};

void each_count(const std::string& layout, const std::vector<std::string>& names,
                const std::function<void(RootsTalk&)>& body) {
  mpi::run_ranks(static_cast<int>(layout.size()), [&](const mpi::Rank& rank) {
    for (const std::string& name : names) {
      for (const size_t count : {size_t{100}, kSome}) {
        SCOPED_TRACE(name + " over " + layout + " of " + std::to_string(count));
        RootsTalk talk(rank, layout, name, count);
        body(talk);
      }
    }
    part(rank);
  });
}

TEST(NodesMismatch, OfRootsOnANodeFailsOnBoth) {
  each_count("aa", {"broadcast", "reduce", "gather", "scatter"}, [](RootsTalk& talk) {
    expect_error(ErrorKind::kMismatch, {"disagree", "with root 0", "with root 1"}, talk.disagree());
  });
}

void ends_by_the_next_barrier(RootsTalk& talk) {
  auto error = talk.disagree();
  if (!error) error = talk.barrier();
  EXPECT_TRUE(tells_of_a_difference(error)) << text_of(error);
}

TEST(NodesMismatch, OfRootsFailsByTheNextBarrier) {
  each_count("aabb", {"broadcast", "reduce", "gather", "scatter"}, ends_by_the_next_barrier);
  each_count("abc", {"broadcast", "reduce", "gather", "scatter"}, ends_by_the_next_barrier);
  each_count("ab", {"broadcast", "scatter"}, ends_by_the_next_barrier);
}

// Each rank takes itself for the root, sends a block, and waits for an empty answer. Instead it
// receives the other rank's block, which is much longer. It must still compare the headers.
TEST(NodesMismatch, OfLargeBroadcastsRootsFailsOnBoth) {
  mpi::run_ranks(2, [](const mpi::Rank& rank) {
    RootsTalk talk(rank, "ab", "broadcast", kSome);
    expect_error(ErrorKind::kMismatch, {"disagree", "with root 0", "with root 1"}, talk.disagree());
    part(rank);
  });
}

// With one rank on each of two nodes, each rank may name itself as the root. In a reduce or a
// gather, both ranks then wait as the root, and neither receives a header to compare:
// docs/design/messages.md.
TEST(NodesMismatch, OfReceivingRootsEndsAtTheTimeout) {
  each_count("ab", {"reduce", "gather"}, [](RootsTalk& talk) {
    expect_error(ErrorKind::kTimeout, {"timed out", "with root"},
                 talk.disagree(std::chrono::milliseconds{200}));
  });
}

// Returns rank `rank`'s operation in a transfer of one element between two ranks. Rank `from` has
// the element, and the other rank gets it.
OperationPtr move_one(const std::string& name, NodesTalk& talk, float* data, int rank, int from) {
  Communicator& group = talk.communicator();
  if (name == "send/recv" && rank == from)
    return group.send({data, 1}, Dtype::kFloat32, 1 - rank, 0);
  if (name == "send/recv") {
    return group.receive({data, 1}, Dtype::kFloat32, from, 0, std::make_shared<int>());
  }
  const int root = name == "scatter" ? from : 1 - from;
  return kRooted.at(name)(group, talk.next(), reinterpret_cast<std::byte*>(data), 2, 1, root,
                          rank == root);
}

// In the group `name`, both ranks send a message that no rank receives, and end the group. MPI may
// deliver these messages in the ranks' next group, `later`. Then that group must raise an error,
// and must not take the messages for data, even if both groups have the same name.
void leave_unread(const mpi::Rank& rank, const std::string& name, const std::string& later) {
  float data[] = {10, 10};
  {
    NodesTalk talk(rank, name, "ab", uint64_t{256} << 10);
    EXPECT_FALSE(talk.run(move_one(name, talk, data, rank.rank, rank.rank)));
  }
  NodesTalk talk(rank, later, "ab", uint64_t{256} << 10);
  data[0] = data[1] = rank.rank == 0 ? 11 : 0;
  auto error = talk.run(move_one(name, talk, data, rank.rank, 0));
  if (error && rank.rank == 1) {
    expect_error(ErrorKind::kMismatch,
                 {"of group " + later, "rank 0 is of an earlier group", "of group " + name}, error);
  } else {
    EXPECT_EQ(data[0], 11);
  }
  if (!error) error = talk.run(talk.communicator().barrier(talk.next()));
  const bool told = text_of(error).find("earlier group") != std::string::npos;
  EXPECT_TRUE(!error || told) << text_of(error);
}

TEST(NodesMismatch, OfAnEndedGroupCorruptsNoLaterGroup) {
  for (const char* layer : {"auto", "mpi"}) {
    mpi::run_ranks(2, [&](const mpi::Rank& rank) {
      setenv("HBMCOMM_NODE", layer, 1);
      for (const std::string name : {"scatter", "gather", "send/recv"}) {
        SCOPED_TRACE(name + " with HBMCOMM_NODE=" + layer);
        leave_unread(rank, name, name + " later");
        leave_unread(rank, name, name);
      }
      part(rank);
    });
  }
}

}  // namespace
}  // namespace hbm::communicator
