// Operations over real MPI when ranks disagree, come late or die.
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "communicator/mpi/communicator.h"
#include "expect_error.h"
#include "file_store.h"
#include "mpi_ranks.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::milliseconds;

constexpr size_t kChunk = 4096;
constexpr milliseconds kShort{1000};

// One rank's allreduce in a trial. Rank 1's call differs from the other ranks' calls in one member.
struct Call {
  size_t count = 100;
  Dtype dtype = Dtype::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint64_t sequence = 1;
};

std::unique_ptr<progress::Operation> allreduce(const Group& group, const Call& call,
                                               std::vector<double>& data) {
  data.resize(call.count);
  return group.communicator->allreduce(call.sequence, data.data(), data.data(), call.count,
                                       call.dtype, call.op);
}

TEST(MpiMismatch, EveryRanksErrorNamesTheDifference) {
  struct Case {
    std::string name;
    std::string words;  // in every rank's error; empty if the errors share no words
    std::function<void(Call&)> change;
  };
  const std::vector<Case> cases = {
      {"shorter", "99 float32", [](Call& call) { call.count = 99; }},
      {"longer", "", [](Call& call) { call.count = 101; }},
      {"dtype", "100 int32", [](Call& call) { call.dtype = Dtype::kInt32; }},
      {"wider", "", [](Call& call) { call.dtype = Dtype::kFloat64; }},
      {"op", "(MAX)", [](Call& call) { call.op = ReduceOp::kMax; }},
      {"sequence", "#2", [](Call& call) { call.sequence = 2; }},
      {"none", "0 float32", [](Call& call) { call.count = 0; }},
  };
  run_ranks(2, [&](const Rank& rank) {
    for (const Case& each : cases) {
      SCOPED_TRACE(each.name);
      Group group = rank.group(each.name, kChunk);
      Call call;
      if (rank.rank == 1) each.change(call);
      std::vector<double> data;
      const auto error = group.run(allreduce(group, call, data));
      expect_error(ErrorKind::kMismatch,
                   {"ranks disagree in group " + each.name, "allreduce #", each.words}, error);
    }
  });
}

TEST(MpiMismatch, OfTheOperationAndOfLargeTensors) {
  run_ranks(3, [](const Rank& rank) {
    {
      Group group = rank.group("operation", kChunk);
      std::vector<double> data;
      const auto error =
          group.run(rank.rank == 1 ? group.communicator->barrier(1) : allreduce(group, {}, data));
      expect_error(ErrorKind::kMismatch, {"ranks disagree in group operation"}, error);
    }
    Group group = rank.group("large", kChunk);
    std::vector<double> data;
    Call call{.count = 100'000, .dtype = Dtype::kFloat64};
    if (rank.rank == 1) call.count -= 1;
    const auto error = group.run(allreduce(group, call, data));
    expect_error(ErrorKind::kMismatch, {"ranks disagree in group large"}, error);
  });
}

TEST(MpiMismatch, OfATransferFailsItAlone) {
  run_ranks(2, [](const Rank& rank) {
    Group group = rank.group("transfers", kChunk);
    const auto run = [&group](std::unique_ptr<progress::Operation> operation) {
      const auto request = group.transfers->enqueue(std::move(operation), kTimeout, {});
      group.transfers->launch(request, progress::Mode::kSync);
      return request->error();
    };
    std::vector<float> data(10, 1.0f);
    const auto source = std::make_shared<int>(kAnyRank);
    if (rank.rank == 0) {
      EXPECT_FALSE(run(group.communicator->send({data.data(), 10}, Dtype::kFloat32, 1, 3)));
      EXPECT_FALSE(run(group.communicator->send({data.data(), 10}, Dtype::kFloat32, 1, 3)));
    } else {
      expect_error(
          ErrorKind::kMismatch, {"tag 3 of 9 float32", "tag 3 of 10 float32"},
          run(group.communicator->receive({data.data(), 9}, Dtype::kFloat32, 0, 3, source)));
      EXPECT_FALSE(
          run(group.communicator->receive({data.data(), 10}, Dtype::kFloat32, 0, 3, source)));
    }
  });
}

TEST(MpiFailure, AKilledRankIsNamed) {
  constexpr int kVictim = 2;
  const auto body = [](const Rank& rank) {
    Group small = rank.group("small", kChunk);
    Group large = rank.group("large", kChunk);
    Group moves = rank.group("moves", kChunk);
    EXPECT_FALSE(small.run(small.communicator->barrier(++small.sequence)));
    if (rank.rank == kVictim) raise(SIGKILL);

    std::vector<double> data;
    const auto names_it = [](const std::exception_ptr& error) {
      expect_error(ErrorKind::kTimeout, {"timed out after 1000 ms", "missing ranks: 2"}, error);
    };
    names_it(small.run(allreduce(small, {}, data), kShort));
    names_it(
        large.run(allreduce(large, {.count = 100'000, .dtype = Dtype::kFloat64}, data), kShort));
    const std::vector<Sink> nothing(3);
    names_it(moves.run(moves.communicator->allgather(1, {}, nothing, Dtype::kInt8), kShort));
    expect_error(ErrorKind::kAborted, {"refused because the group failed earlier"},
                 [&] { small.run(small.communicator->barrier(++small.sequence)); });
  };
  run_ranks(3, body, {kVictim});
}

TEST(MpiFailure, LateRankIsHarmless) {
  run_ranks(2, [](const Rank& rank) {
    Group early = rank.group("early", kChunk);
    Group after = rank.group("after", kChunk);
    std::vector<double> data;
    FileStore store(rank.directory);
    const progress::Clock::time_point limit = progress::Clock::now() + kTimeout;
    if (rank.rank == 1) {
      EXPECT_TRUE(bootstrap::await_keys(store, {"over"}, limit));
      EXPECT_FALSE(early.run(allreduce(early, {}, data)));  // rank 0's data had arrived
    } else {
      expect_error(ErrorKind::kTimeout, {"missing ranks: 1"},
                   early.run(allreduce(early, {}, data), kShort));
      store.set("over", "", limit);
    }
    EXPECT_FALSE(after.run(after.communicator->barrier(++after.sequence)));
    while (sweep_orphaned() > 0 && progress::Clock::now() < limit)
      std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(sweep_orphaned(), 0u);
  });
}

}  // namespace
}  // namespace hbm::communicator::mpi
