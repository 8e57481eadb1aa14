// Windows over shared memory: puts, signals and their order, deaths, and the end of a window.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "communicator/shared_window.h"
#include "communicator/shm/tuning.h"
#include "expect_error.h"
#include "seeds.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

using progress::Progress;
using std::chrono::milliseconds;

constexpr size_t kCount = 1000;                                      // floats of a window
constexpr size_t kTwoSlices = kBytesPerPoll / sizeof(float) + 1000;  // floats that take two polls

std::shared_ptr<SharedWindow> window_on(NodeRank& rank, float* data, size_t count) {
  return rank.collectives->make_window(data, count * sizeof(float));
}

float* allocate_zeros(NodeRank& rank, size_t count) {
  auto* const data = reinterpret_cast<float*>(rank.segment->allocate(count * sizeof(float)));
  std::fill_n(data, count, 0.0f);
  return data;
}

// The ranks of a node, all in this thread, with a window. Each rank has `count` floats in it, which
// are 0.
struct WindowedRanks {
  explicit WindowedRanks(int size, size_t floats = kCount)
      : count(floats),
        node({.size = size, .segment_bytes = floats * sizeof(float) + (size_t{1} << 20)}) {
    std::vector<WindowPart> parts;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<NodeRank>(node, rank));
      data.push_back(allocate_zeros(*ranks.back(), count));
      windows.push_back(window_on(*ranks.back(), data.back(), count));
      parts.push_back(windows.back()->part());
    }
    for (const auto& window : windows) window->connect(parts);
  }

  OperationPtr put(size_t from, const std::vector<float>& values, int to, size_t offset = 0) {
    return windows[from]->put({values.data(), values.size()}, Dtype::kFloat32, to,
                              offset * sizeof(float));
  }

  std::vector<float> values(size_t rank) const { return {data[rank], data[rank] + count}; }

  const size_t count;
  TestNode node;
  std::vector<std::unique_ptr<NodeRank>> ranks;
  std::vector<float*> data;
  std::vector<std::shared_ptr<SharedWindow>> windows;
};

std::vector<float> random_floats(size_t count) {
  std::mt19937_64 random = test_random();
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random() % 1000 + 1);
  return values;
}

Progress begin_and_poll(const OperationPtr& operation) {
  operation->begin();
  return operation->poll();
}

TEST(NodeWindow, PutsWriteTheirPartOfTheTargetAlone) {
  WindowedRanks all(3);
  const std::vector<float> values = random_floats(kCount / 2);
  for (const int to : {0, 1}) {  // to the rank itself, and to another
    const size_t offset = to == 0 ? 7 : kCount - values.size();
    EXPECT_EQ(begin_and_poll(all.put(0, values, to, offset)), Progress::kDone);
    std::vector<float> expected(kCount);
    std::copy(values.begin(), values.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
    EXPECT_EQ(all.values(static_cast<size_t>(to)), expected);
  }
  EXPECT_EQ(begin_and_poll(all.put(0, {}, 2, kCount)), Progress::kDone);
  EXPECT_EQ(all.values(2), std::vector<float>(kCount));
}

TEST(NodeWindow, ShowsTheDataOfEachRank) {
  WindowedRanks all(3);
  EXPECT_EQ(all.ranks[1]->collectives->memory_ranks(), (std::vector<int>{0, 1, 2}));
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(all.windows[1]->data(rank),
              reinterpret_cast<std::byte*>(all.data[static_cast<size_t>(rank)]));
  }
}

TEST(NodeWindow, ASignalFollowsThePutsBeforeIt) {
  WindowedRanks all(2, kTwoSlices);
  const std::vector<float> values = random_floats(kTwoSlices);
  const OperationPtr put = all.put(0, values, 1);
  const OperationPtr signal = all.windows[0]->signal(1, 0);
  const OperationPtr wait = all.windows[1]->wait_signal(0, 0);
  put->begin();
  EXPECT_EQ(begin_and_poll(signal), Progress::kIdle);
  EXPECT_EQ(begin_and_poll(wait), Progress::kIdle);
  EXPECT_EQ(put->poll(), Progress::kActive);
  EXPECT_EQ(signal->poll(), Progress::kIdle);
  EXPECT_EQ(put->poll(), Progress::kDone);
  EXPECT_EQ(wait->poll(), Progress::kIdle);
  EXPECT_EQ(signal->poll(), Progress::kDone);
  EXPECT_EQ(wait->poll(), Progress::kDone);
  EXPECT_EQ(all.values(1), values);
}

TEST(NodeWindow, PutsToOneTargetTakeEffectInOrder) {
  WindowedRanks all(3);
  const std::vector<float> first(kCount, 1.0f), second(kCount, 2.0f);
  const OperationPtr earlier = all.put(0, first, 1);
  const OperationPtr later = all.put(0, second, 1);
  const OperationPtr elsewhere = all.put(0, second, 2);
  earlier->begin();
  later->begin();
  EXPECT_EQ(later->poll(), Progress::kIdle);
  EXPECT_EQ(begin_and_poll(elsewhere), Progress::kDone);
  EXPECT_EQ(earlier->poll(), Progress::kDone);
  EXPECT_EQ(later->poll(), Progress::kDone);
  EXPECT_EQ(all.values(1), second);
}

TEST(NodeWindow, SignalsOfEachRankAreCounted) {
  WindowedRanks all(3);
  for (const size_t from : {0, 0, 1, 0}) {
    EXPECT_EQ(begin_and_poll(all.windows[from]->signal(2, 0)), Progress::kDone);
  }
  for (const int from : {0, 1, 0, 0}) {
    EXPECT_EQ(begin_and_poll(all.windows[2]->wait_signal(from, 0)), Progress::kDone);
  }
  for (const int from : {0, 1, 2}) {
    const OperationPtr wait = all.windows[2]->wait_signal(from, 0);
    EXPECT_EQ(begin_and_poll(wait), Progress::kIdle);
    wait->abandon();
  }
  EXPECT_EQ(begin_and_poll(all.windows[2]->signal(2, 0)), Progress::kDone);
  EXPECT_EQ(begin_and_poll(all.windows[2]->wait_signal(2, 0)), Progress::kDone);
}

// Expects that puts and signals of rank 0 to rank 1 are refused, and that rank 1 gets no signal.
void expect_refused(WindowedRanks& all, const std::string& lost) {
  const std::vector<float> values(1, 5.0f);
  const OperationPtr put = all.put(0, values, 1), signal = all.windows[0]->signal(1, 0);
  for (progress::Operation* const operation : {put.get(), signal.get()}) {
    operation->begin();
    expect_error(ErrorKind::kAborted,
                 {"to rank 1 on rank 0 of the test's group was refused", lost, "register it again"},
                 [&] { operation->poll(); });
    operation->abandon();
  }
  const OperationPtr wait = all.windows[1]->wait_signal(0, 0);
  EXPECT_EQ(begin_and_poll(wait), Progress::kIdle);
  wait->abandon();
}

TEST(NodeWindow, NoSignalFollowsAPutThatWasGivenUp) {
  WindowedRanks all(3, kTwoSlices);
  const std::vector<float> values = random_floats(kTwoSlices);
  const OperationPtr half = all.put(0, values, 1);
  const OperationPtr signal = all.windows[0]->signal(1, 0);
  EXPECT_EQ(begin_and_poll(half), Progress::kActive);
  EXPECT_EQ(begin_and_poll(signal), Progress::kIdle);
  half->abandon();
  EXPECT_FALSE(half->peers_may_write());
  const std::string lost = "window put of " + std::to_string(kTwoSlices) + " float32 to rank 1";
  expect_error(ErrorKind::kAborted, {"window signal to rank 1", lost}, [&] { signal->poll(); });
  signal->abandon();
  expect_refused(all, lost);
  const std::vector<float> last(all.data[1] + kTwoSlices - 1000, all.data[1] + kTwoSlices);
  EXPECT_EQ(last, std::vector<float>(1000));
  EXPECT_EQ(begin_and_poll(all.windows[0]->signal(2, 0)), Progress::kDone);  // another target
  EXPECT_EQ(begin_and_poll(all.windows[2]->signal(1, 0)), Progress::kDone);  // of another rank
  EXPECT_EQ(begin_and_poll(all.windows[0]->drain()), Progress::kDone);
}

TEST(NodeWindow, APutThatCopiedNothingIsLostToo) {
  WindowedRanks all(2, kTwoSlices);
  const std::vector<float> values = random_floats(kTwoSlices), few(7, 1.0f);
  const OperationPtr first = all.put(0, values, 1);
  const OperationPtr never = all.put(0, few, 1);
  EXPECT_EQ(begin_and_poll(first), Progress::kActive);
  EXPECT_EQ(begin_and_poll(never), Progress::kIdle);
  never->abandon();
  EXPECT_EQ(first->poll(), Progress::kDone);
  expect_refused(all, "window put of 7 float32 to rank 1");
  EXPECT_EQ(all.values(1), values);
}

TEST(NodeWindow, ASignalOrAPutThatDidNotBeginIsNoLoss) {
  WindowedRanks all(2, kTwoSlices);
  const std::vector<float> values = random_floats(kTwoSlices);
  const OperationPtr put = all.put(0, values, 1);
  const OperationPtr signal = all.windows[0]->signal(1, 0);
  EXPECT_EQ(begin_and_poll(put), Progress::kActive);
  EXPECT_EQ(begin_and_poll(signal), Progress::kIdle);
  signal->abandon();
  EXPECT_EQ(put->poll(), Progress::kDone);
  put->abandon();  // an error after its end, in an epilogue
  all.put(0, values, 1)->abandon();
  EXPECT_EQ(begin_and_poll(all.windows[0]->drain()), Progress::kDone);
  const OperationPtr late = all.put(0, values, 1);
  expect_error(ErrorKind::kInvalid, {"cannot begin"}, [&] { late->begin(); });
  late->abandon();
  all.windows[0]->reopen();
  EXPECT_EQ(begin_and_poll(all.windows[0]->signal(1, 0)), Progress::kDone);
  EXPECT_EQ(begin_and_poll(all.windows[1]->wait_signal(0, 0)), Progress::kDone);
}

TEST(NodeWindow, AWaitThatTimesOutTakesNoSignal) {
  WindowedRanks all(2);
  expect_error(ErrorKind::kTimeout,
               {"window wait_signal from rank 0 on rank 1 of the test's group",
                "timed out after 20 ms", "missing ranks: 0"},
               all.ranks[1]->transfer(all.windows[1]->wait_signal(0, 0), milliseconds(20)));
  EXPECT_FALSE(all.ranks[0]->transfer(all.windows[0]->signal(1, 0)));
  EXPECT_FALSE(all.ranks[1]->transfer(all.windows[1]->wait_signal(0, 0)));
  const OperationPtr another = all.windows[1]->wait_signal(0, 0);
  EXPECT_EQ(begin_and_poll(another), Progress::kIdle);
  another->abandon();
}

TEST(NodeWindow, OperationsOnADeadRankFailWithoutAnEffect) {
  WindowedRanks all(2);
  all.ranks[1]->die();
  const std::vector<float> values(kCount, 1.0f);
  expect_error(
      ErrorKind::kDeath,
      {"window put of 1000 float32 to rank 1 on rank 0 of the test's group", "rank 1 has died"},
      all.ranks[0]->transfer(all.put(0, values, 1)));
  EXPECT_EQ(all.values(1), std::vector<float>(kCount));
  expect_error(ErrorKind::kDeath, {"rank 1 has died"},
               all.ranks[0]->transfer(all.windows[0]->signal(1, 0)));
}

TEST(NodeWindow, AWaitEndsWhenTheSignallingRankDies) {
  WindowedRanks all(2);
  EXPECT_FALSE(all.ranks[1]->transfer(all.windows[1]->signal(0, 0)));
  all.ranks[1]->die();
  EXPECT_FALSE(all.ranks[0]->transfer(all.windows[0]->wait_signal(1, 0)));  // sent before the death
  expect_error(ErrorKind::kDeath, {"window wait_signal from rank 1", "rank 1 has died"},
               all.ranks[0]->transfer(all.windows[0]->wait_signal(1, 0)));
}

TEST(NodeWindow, NothingMovesAfterAFailureOfTheGroup) {
  WindowedRanks all(3);
  all.ranks[2]->shm_group->report("out of paint", /*death=*/false);
  const std::vector<float> values(kCount, 1.0f);
  for (const bool puts : {true, false}) {
    expect_error(
        ErrorKind::kPeer, {"the test's group has failed: out of paint"},
        all.ranks[0]->transfer(puts ? all.put(0, values, 1) : all.windows[0]->signal(1, 0)));
  }
  EXPECT_EQ(all.values(1), std::vector<float>(kCount));
  expect_error(ErrorKind::kPeer, {"out of paint"},
               all.ranks[1]->transfer(all.windows[1]->wait_signal(0, 0)));
}

TEST(NodeWindow, ADrainWaitsForOperationsAndRefusesMore) {
  WindowedRanks all(2, kTwoSlices);
  const std::vector<float> values = random_floats(kTwoSlices);
  const OperationPtr put = all.put(0, values, 1);
  const OperationPtr drain = all.windows[0]->drain();
  EXPECT_EQ(begin_and_poll(put), Progress::kActive);
  EXPECT_EQ(begin_and_poll(drain), Progress::kIdle);
  SharedWindow& window = *all.windows[0];
  for (const OperationPtr& late :
       {all.put(0, {}, 1), window.signal(1, 0), window.wait_signal(1, 0), window.signal(0, 0)}) {
    expect_error(ErrorKind::kInvalid, {"cannot begin", "deregistering"}, [&] { late->begin(); });
    late->abandon();
  }
  EXPECT_EQ(put->poll(), Progress::kDone);
  EXPECT_EQ(drain->poll(), Progress::kDone);
  window.reopen();
  EXPECT_EQ(begin_and_poll(window.signal(1, 0)), Progress::kDone);
}

TEST(NodeWindow, CountsTheWaitsThatHaveNotEnded) {
  WindowedRanks all(2);
  const OperationPtr first = all.windows[0]->wait_signal(1, 0);
  const OperationPtr second = all.windows[0]->wait_signal(1, 0);
  EXPECT_EQ(all.windows[0]->waits(), 0u);
  first->begin();
  second->begin();
  EXPECT_EQ(all.windows[0]->waits(), 2u);
  EXPECT_EQ(begin_and_poll(all.windows[1]->signal(0, 0)), Progress::kDone);
  EXPECT_EQ(first->poll(), Progress::kDone);
  EXPECT_EQ(all.windows[0]->waits(), 1u);
  second->abandon();
  EXPECT_EQ(all.windows[0]->waits(), 0u);
}

TEST(NodeWindow, AWaitTakesNoSignalOfAnotherChannel) {
  WindowedRanks all(2);
  EXPECT_EQ(begin_and_poll(all.windows[0]->signal(1, 3)), Progress::kDone);
  for (int channel = 0; channel < kSignalChannels; ++channel) {
    const OperationPtr wait = all.windows[1]->wait_signal(0, channel);
    EXPECT_EQ(begin_and_poll(wait), channel == 3 ? Progress::kDone : Progress::kIdle);
    wait->abandon();
  }
}

TEST(NodeWindow, IsReleasedWhenAllRanksHaveReleasedIt) {
  WindowedRanks all(3);
  const OperationPtr wait = all.windows[0]->wait_signal(1, 0);
  wait->begin();
  EXPECT_FALSE(all.windows[0]->release());
  EXPECT_TRUE(all.windows[1]->release());
  EXPECT_TRUE(all.windows[2]->release());
  for (const auto& window : all.windows) EXPECT_FALSE(window->released());
  const OperationPtr late = all.windows[0]->signal(1, 0);
  expect_error(ErrorKind::kInvalid, {"cannot begin"}, [&] { late->begin(); });
  late->abandon();
  wait->abandon();
  EXPECT_TRUE(all.windows[0]->release());
  EXPECT_TRUE(all.windows[0]->release());  // again, without an effect
  const size_t blocks = all.node.segments[0]->blocks();
  for (const auto& window : all.windows) EXPECT_TRUE(window->released());
  all.windows[0]->close();
  EXPECT_EQ(all.node.segments[0]->blocks(), blocks - 1);
}

// A rank may use the memory of its counts again while the other ranks still wait for one another.
TEST(NodeWindow, WritesNothingAfterItsRelease) {
  WindowedRanks all(2);
  const uint64_t place = all.windows[0]->part().signals;
  EXPECT_TRUE(all.windows[1]->release());
  EXPECT_TRUE(all.windows[0]->release());
  ASSERT_TRUE(all.windows[0]->released());
  all.windows[0]->close();
  const size_t count = 1000;
  const float* const again = allocate_zeros(*all.ranks[0], count);
  const auto* const counts = reinterpret_cast<const float*>(all.ranks[0]->shm_group->at(0, place));
  ASSERT_LE(again, counts);
  ASSERT_LT(counts, again + count);
  EXPECT_TRUE(all.windows[1]->release());
  EXPECT_TRUE(all.windows[1]->released());
  EXPECT_TRUE(std::all_of(again, again + count, [](float value) { return value == 0; }));
}

TEST(NodeWindow, KeepsItsCountsUnlessItIsClosed) {
  TestNode node({.size = 2});
  NodeRank rank(node, 0), other(node, 1);
  float* const data = allocate_zeros(rank, kCount);
  const size_t blocks = node.segments[0]->blocks();
  for (const bool closes : {true, false}) {
    const auto window = window_on(rank, data, kCount);
    EXPECT_EQ(node.segments[0]->blocks(), blocks + 1);
    if (closes) window->close();
  }
  EXPECT_EQ(node.segments[0]->blocks(), blocks + 1);  // peers may still signal the second
}

TEST(NodeWindow, NeedsDataInTheSegment) {
  TestNode node({.size = 2});
  NodeRank rank(node, 0), other(node, 1);
  std::vector<float> ordinary(kCount);
  const size_t blocks = node.segments[0]->blocks();
  EXPECT_EQ(window_on(rank, ordinary.data(), kCount), nullptr);
  EXPECT_EQ(window_on(rank, reinterpret_cast<float*>(other.segment->base()), kCount), nullptr);
  EXPECT_EQ(node.segments[0]->blocks(), blocks);
  EXPECT_NE(window_on(rank, nullptr, 0), nullptr);  // no data, wherever they are
}

TEST(NodeWindow, RefusesPartsBeyondASegment) {
  WindowedRanks all(2);
  const WindowPart good = all.windows[1]->part();
  const uint64_t end = all.node.segments[1]->size();
  for (const WindowPart& bad : {WindowPart{end, 1, good.signals}, WindowPart{0, end + 1, 0},
                                WindowPart{good.data, good.bytes, end},
                                WindowPart{good.data, good.bytes, good.signals + 8}}) {
    expect_error(ErrorKind::kMismatch, {"rank 1 of the test's group", "of its shared segment"},
                 [&] { all.windows[0]->connect({all.windows[0]->part(), bad}); });
  }
}

// Each rank puts data into the next rank's window, and signals it. The next rank reads the data,
// and signals that the memory is free again. Some ranks sleep in their waits.
TEST(NodeWindow, SignalsOrderTheDataOfARing) {
  constexpr int kRounds = 200;
  for (const int size : {1, 2, 4}) {
    std::vector<WindowPart> parts(static_cast<size_t>(size));
    std::barrier<> all(size);
    run_node({.size = size}, [&](NodeRank& rank) {
      float* const data = allocate_zeros(rank, kCount);
      const auto window = window_on(rank, data, kCount);
      parts[static_cast<size_t>(rank.rank)] = window->part();
      all.arrive_and_wait();
      window->connect(parts);
      const int next = (rank.rank + 1) % size, before = (rank.rank + size - 1) % size;
      for (int round = 0; round < kRounds; ++round) {
        const auto value = [&](int from) { return static_cast<float>(round * size + from); };
        const std::vector<float> sent(kCount, value(rank.rank));
        EXPECT_FALSE(
            rank.transfer(window->put({sent.data(), sent.size()}, Dtype::kFloat32, next, 0)));
        EXPECT_FALSE(rank.transfer(window->signal(next, 0)));
        EXPECT_FALSE(rank.transfer(window->wait_signal(before, 0)));
        EXPECT_EQ(std::vector<float>(data, data + kCount),
                  std::vector<float>(kCount, value(before)));
        EXPECT_FALSE(rank.transfer(window->signal(before, 0)));
        EXPECT_FALSE(rank.transfer(window->wait_signal(next, 0)));
      }
      EXPECT_FALSE(rank.transfer(window->drain()));
      all.arrive_and_wait();
      window->close();
    });
  }
}

}  // namespace
}  // namespace hbm::communicator::shm
