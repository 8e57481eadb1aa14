// The facts that operations within a node note of themselves: whether their data was staged, and
// for which rank they waited.
#include <gtest/gtest.h>

#include <barrier>
#include <memory>
#include <utility>
#include <vector>

#include "communicator/shm/tuning.h"
#include "progress/observation.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

using progress::Observation;

// The fewest elements for zero-copy.
constexpr size_t kCount = kZeroCopyBytes / sizeof(float);
constexpr size_t kReducedCount = kZeroCopyReductionBytes / sizeof(float);
constexpr int kTag = 1;

// Elements in the segment of a rank or in private memory.
class Floats {
 public:
  Floats(const NodeRank& rank, size_t count, bool in_segment) : private_(in_segment ? 0 : count) {
    if (in_segment) {
      block_ = {rank.segment->allocate(count * sizeof(float)),
                [segment = rank.segment](std::byte* block) { segment->free(block); }};
      std::uninitialized_fill_n(data(), count, 0.0F);
    }
  }
  float* data() { return block_ ? reinterpret_cast<float*>(block_.get()) : private_.data(); }

 private:
  std::vector<float> private_;
  std::shared_ptr<std::byte> block_;
};

// Enqueues an operation. When it is done, its observation is in `observed`.
std::shared_ptr<progress::Request> enqueue(progress::OperationQueue& queue, OperationPtr operation,
                                           Observation& observed) {
  const progress::Operation* const running = operation.get();
  return queue.enqueue(std::move(operation), kTimeout,
                       {{}, [running, &observed] { observed = running->observed(); }});
}

Observation run(progress::OperationQueue& queue, OperationPtr operation) {
  Observation observed;
  const auto request = enqueue(queue, std::move(operation), observed);
  queue.launch(request, progress::Mode::kSync);
  EXPECT_FALSE(request->error());
  return observed;
}

void expect_data(const Observation& found, bool staged, bool zero_copy) {
  EXPECT_EQ(found.staged, staged);
  EXPECT_EQ(found.zero_copy, zero_copy);
}

Observation allreduce(NodeRank& rank, size_t count, bool in_segment) {
  Floats data(rank, count, in_segment);
  return run(*rank.ordered, rank.collectives->allreduce(++rank.sequence, data.data(), data.data(),
                                                        count, Dtype::kFloat32, ReduceOp::kSum));
}

TEST(Observation, OfAReductionIsZeroCopyIfAllTensorsAreInSegments) {
  for (const int size : {2, 5}) {
    run_node({.size = size}, [](NodeRank& rank) {
      expect_data(allreduce(rank, kReducedCount, true), false, true);
      expect_data(allreduce(rank, 10 * kReducedCount, false), true, false);
      expect_data(allreduce(rank, kReducedCount, rank.rank == 0), true, false);
      expect_data(allreduce(rank, kReducedCount - 1, true), true, false);
      expect_data(allreduce(rank, 0, true), false, false);
    });
  }
}

TEST(Observation, OfTransfersHasWhatEachRankSendsAndReceives) {
  run_node({.size = 2}, [](NodeRank& rank) {
    const bool sends = rank.rank == 0;
    for (const bool in_segment : {false, true}) {
      // Rank 1's tensor is in private memory, and it takes the data out of rank 0's segment.
      Floats data(rank, kCount, sends && in_segment);
      Communicator& group = *rank.collectives;
      expect_data(run(*rank.ordered,
                      group.broadcast(++rank.sequence, data.data(), kCount, Dtype::kFloat32, 0)),
                  !in_segment, in_segment);
      OperationPtr message = sends ? group.send({data.data(), kCount}, Dtype::kFloat32, 1, kTag)
                                   : group.receive({data.data(), kCount}, Dtype::kFloat32, 0, kTag,
                                                   std::make_shared<int>(kAnyRank));
      expect_data(run(*rank.transfers, std::move(message)), !in_segment, in_segment);
      // Rank 0 sends zero-copy, and receives staged data.
      Floats all(rank, 2 * kCount, false);
      const std::vector<Sink> outputs = {{all.data(), kCount}, {all.data() + kCount, kCount}};
      expect_data(run(*rank.ordered, group.allgather(++rank.sequence, {data.data(), kCount},
                                                     outputs, Dtype::kFloat32)),
                  true, in_segment);
    }
  });
}

TEST(Observation, OfABarrierHasNoData) {
  run_node({.size = 2}, [](NodeRank& rank) {
    expect_data(run(*rank.ordered, rank.collectives->barrier(++rank.sequence)), false, false);
  });
}

TEST(Observation, NamesTheRankThatBeganLast) {
  progress::times_noted = true;
  std::barrier<> rank_0_has_begun(2);
  run_node({.size = 2}, [&](NodeRank& rank) {
    float data = 1;
    OperationPtr operation = rank.collectives->allreduce(++rank.sequence, &data, &data, 1,
                                                         Dtype::kFloat32, ReduceOp::kSum);
    if (rank.rank == 1) {
      rank_0_has_begun.arrive_and_wait();
      const Clock::time_point before = Clock::now();
      while (Clock::now() == before) {
      }
      const Observation found = run(*rank.ordered, std::move(operation));
      EXPECT_EQ(found.last_rank, -1);
      EXPECT_EQ(found.waited_ns, 0);
      return;
    }
    Observation found;
    const auto request = enqueue(*rank.ordered, std::move(operation), found);
    rank.ordered->launch(request, progress::Mode::kAsync);
    rank_0_has_begun.arrive_and_wait();
    EXPECT_TRUE(rank.ordered->wait(request, Clock::time_point::max()));
    EXPECT_EQ(found.last_rank, 1);
    EXPECT_GT(found.waited_ns, 0);
  });
  progress::times_noted = false;
  run_node({.size = 2}, [](NodeRank& rank) { EXPECT_EQ(allreduce(rank, 1, false).last_rank, -1); });
}

}  // namespace
}  // namespace hbm::communicator::shm
