// Operations within a node if the ranks disagree, or a rank publishes invalid values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "communicator/message.h"
#include "communicator/scatter_gather.h"
#include "expect_error.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

constexpr size_t kLarge = 100'000;  // elements: many chunks

struct Call {
  OpCode op = OpCode::kAllreduce;
  size_t count = 100;
  Dtype dtype = Dtype::kFloat32;
  ReduceOp reduce_op = ReduceOp::kSum;
  int root = 0;
  uint64_t sequence = 1;
};

OperationPtr make(NodeRank& rank, const Call& call, void* data) {
  Communicator& group = *rank.collectives;
  const uint64_t sequence = call.sequence;
  switch (call.op) {
    case OpCode::kReduce:
      return group.reduce(sequence, data, data, call.count, call.dtype, call.reduce_op, call.root);
    case OpCode::kBroadcast:
      return group.broadcast(sequence, data, call.count, call.dtype, call.root);
    case OpCode::kBarrier:
      return group.barrier(sequence);
    default:
      return group.allreduce(sequence, data, data, call.count, call.dtype, call.reduce_op);
  }
}

TEST(NodeMismatch, EveryRanksErrorNamesTheDifference) {
  struct Case {
    std::string words;
    Call usual;
    std::function<void(Call&)> change;  // of rank 1's call
  };
  const Call large{.count = kLarge};
  const Call rooted{.op = OpCode::kReduce};
  const Call broadcast{.op = OpCode::kBroadcast};
  const std::vector<Case> cases = {
      {"99 float32", {}, [](Call& call) { call.count = 99; }},
      {"101 float32", {}, [](Call& call) { call.count = 101; }},
      {"0 float32", {}, [](Call& call) { call.count = 0; }},
      {"100 int32", {}, [](Call& call) { call.dtype = Dtype::kInt32; }},
      {"100 float64", {}, [](Call& call) { call.dtype = Dtype::kFloat64; }},
      {"(MAX)", {}, [](Call& call) { call.reduce_op = ReduceOp::kMax; }},
      {"#2", {}, [](Call& call) { call.sequence = 2; }},
      {"barrier #1", {}, [](Call& call) { call.op = OpCode::kBarrier; }},
      {"99999 float32", large, [](Call& call) { call.count = kLarge - 1; }},
      {"of 100 float32", large, [](Call& call) { call.count = 100; }},
      {"broadcast #1", large, [](Call& call) { call.op = OpCode::kBroadcast; }},
      {"with root 1", rooted, [](Call& call) { call.root = 1; }},
      {"with root 2", broadcast, [](Call& call) { call.root = 2; }},
      {"of 100 int8", broadcast, [](Call& call) { call.dtype = Dtype::kInt8; }},
  };
  for (const bool in_segment : {false, true}) {
    for (const Case& each : cases) {
      SCOPED_TRACE(each.words);
      run_node({.size = 3}, [&](NodeRank& rank) {
        Call call = each.usual;
        if (rank.rank == 1) each.change(call);
        std::vector<double> memory(in_segment ? 0 : kLarge);
        void* const data = in_segment
                               ? static_cast<void*>(rank.segment->allocate(kLarge * sizeof(double)))
                               : memory.data();
        expect_error(ErrorKind::kMismatch, {"ranks disagree in the test's group", each.words},
                     rank.run(make(rank, call, data)));
      });
    }
  }
}

// Rank 1 expects one element too few from rank 0. In the reduce_scatter, rank 0 sends one element
// too few to rank 1 instead.
TEST(NodeMismatch, OfShortTransfersReachesEveryRank) {
  for (const OpCode op : {OpCode::kAlltoall, OpCode::kAllgather, OpCode::kScatter,
                          OpCode::kBroadcast, OpCode::kReduceScatter, OpCode::kGather}) {
    SCOPED_TRACE(op_name(op));
    run_node({.size = 3}, [op](NodeRank& rank) {
      std::vector<float> data(60);
      std::vector<Source> inputs;
      std::vector<Sink> outputs;
      for (int peer = 0; peer < 3; ++peer) {
        inputs.push_back({data.data() + 10 * peer, 10});
        outputs.push_back({data.data() + 30 + 10 * peer, 10});
      }
      if (rank.rank == 1) outputs[0].count = 9;
      if (rank.rank == 0 && op == OpCode::kReduceScatter) inputs[1].count = 9;
      Communicator& group = *rank.collectives;
      const bool first = rank.rank == 0, second = rank.rank == 1;
      const auto operation = [&] {
        switch (op) {
          case OpCode::kAllgather:
            return group.allgather(1, inputs[0], outputs, Dtype::kFloat32);
          case OpCode::kScatter:
            return group.scatter(1, first ? inputs : Sources(), outputs[0], Dtype::kFloat32, 0);
          case OpCode::kGather:
            return group.gather(1, inputs[0], second ? outputs : Sinks(), Dtype::kFloat32, 1);
          case OpCode::kBroadcast:
            return group.broadcast(1, data.data(), outputs[0].count, Dtype::kFloat32, 0);
          case OpCode::kReduceScatter:
            return group.reduce_scatter(1, inputs, data.data() + 30, Dtype::kFloat32,
                                        ReduceOp::kSum);
          default:
            return group.alltoall(1, inputs, outputs, Dtype::kFloat32);
        }
      };
      const std::string name = op_name(op);
      const auto error = rank.run(operation());
      if (second) {
        return expect_error(ErrorKind::kMismatch,
                            {"ranks disagree", name + " #1", "of 9 float32", "of 10 float32"},
                            error);
      }
      expect_error(ErrorKind::kPeer, {"has failed: ranks disagree", name + " #1", "of 9 float32"},
                   error);
    });
  }
}

TEST(NodeMismatch, OfAGatherIsDetectedBeforeWriting) {
  run_node({.size = 2}, [](NodeRank& rank) {
    auto* const data = reinterpret_cast<float*>(rank.segment->allocate(3 * kLarge * sizeof(float)));
    std::fill_n(data, 3 * kLarge, static_cast<float>(rank.rank));
    const std::vector<Sink> outputs = {{data + kLarge, kLarge}, {data + 2 * kLarge, kLarge - 1}};
    const auto error = rank.run(rank.collectives->gather(
        1, {data, kLarge}, rank.rank == 0 ? outputs : Sinks{}, Dtype::kFloat32, 0));
    expect_error(ErrorKind::kMismatch, {"gather #1 of 99999", "gather #1 of 100000"}, error);
    EXPECT_EQ(data[2 * kLarge], static_cast<float>(rank.rank));
  });
}

TEST(NodeMismatch, NamesTheCountsOfBothRanks) {
  run_node({.size = 2}, [](NodeRank& rank) {
    std::vector<float> data(100);
    if (rank.rank == 0) {
      return expect_error(ErrorKind::kMismatch, {"barrier #1", "allreduce #1 (SUM) of 100 float32"},
                          rank.run(rank.collectives->barrier(1)));
    }
    expect_error(ErrorKind::kMismatch, {"barrier #1", "allreduce #1 (SUM) of 100 float32"},
                 rank.run(make(rank, {}, data.data())));
  });
}

TEST(NodeMismatch, OfInvalidSlotsIsDetectedBeforeUse) {
  struct Spoiled {
    const char* words;
    std::function<void(Slot&, TransferLocation&)> spoil;
    OpCode op = OpCode::kAlltoall;
  };
  const std::vector<Spoiled> cases = {
      {"rounds of 0", [](Slot& slot, TransferLocation&) { slot.chunk = 0; }},
      {"rounds of 1073741824", [](Slot& slot, TransferLocation&) { slot.chunk = 1u << 30; }},
      {"in 0 rounds", [](Slot& slot, TransferLocation&) { slot.rounds = 0; }},
      {"in 1000000 rounds", [](Slot& slot, TransferLocation&) { slot.rounds = 1'000'000; }},
      {"at 262112 of its slots",
       [](Slot&, TransferLocation& location) { location.offset = 256 * 1024 - 32; }},
      {"at 18446744073709551615",
       [](Slot&, TransferLocation& location) { location.offset = ~uint64_t{0}; }},
      {"names a transfer", [](Slot&, TransferLocation& location) { location.kind = 9; }},
      {"names a transfer",
       [](Slot&, TransferLocation& location) { location.kind = TransferLocation::kZeroCopy; }},
      {"rounds of 64", [](Slot& slot, TransferLocation&) { slot.chunk = 64; },
       OpCode::kReduceScatter},
  };
  for (const Spoiled& each : cases) {
    SCOPED_TRACE(each.words);
    TestNode node({.size = 2});
    NodeRank good(node, 0), bad(node, 1);
    std::vector<float> data(20), result(20);
    const std::vector<Source> inputs = {{data.data(), 10}, {data.data() + 10, 10}};
    const auto collective = [&](NodeRank& rank) {
      if (each.op == OpCode::kReduceScatter) {
        return rank.collectives->reduce_scatter(1, inputs, result.data(), Dtype::kFloat32,
                                                ReduceOp::kSum);
      }
      return rank.collectives->alltoall(1, inputs, {{result.data(), 10}, {result.data() + 10, 10}},
                                        Dtype::kFloat32);
    };
    const OperationPtr mine = collective(good), theirs = collective(bad);
    Slot& slot = bad.shm_group->next_slot();
    mine->begin();
    theirs->begin();
    each.spoil(slot, bad.shm_group->locations(slot)[0]);
    expect_error(ErrorKind::kMismatch, {"rank 1 of the test's group", each.words},
                 [&] { mine->poll(); });
  }
}

}  // namespace
}  // namespace hbm::communicator::shm
