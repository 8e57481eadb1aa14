// Operations within a node when ranks die, fail or come late.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

using std::chrono::milliseconds;

// Twenty times the time within which docs/failures.md promises an error.
constexpr milliseconds kPrompt{2000};

constexpr size_t kLarge = 100'000;  // elements: many chunks

// A point in time that one rank sets, and from which other ranks measure.
class Moment {
 public:
  void set() { at_ = Clock::now().time_since_epoch().count(); }
  milliseconds since() const {
    return std::chrono::duration_cast<milliseconds>(Clock::now().time_since_epoch() -
                                                    Clock::duration(at_.load()));
  }

 private:
  std::atomic<Clock::rep> at_{0};
};

// Expects that in one of five attempts the slowest rank takes less than kPrompt.
void expect_prompt(const std::function<milliseconds()>& attempt) {
  milliseconds time = kPrompt;
  for (int i = 0; i < 5 && time >= kPrompt; ++i) time = attempt();
  EXPECT_LT(time, kPrompt);
}

// Runs a receive from rank 1 on rank 0, and a barrier on other ranks. Returns the error.
std::exception_ptr receive_or_barrier(NodeRank& rank) {
  if (rank.rank > 0) return rank.run(rank.collectives->barrier(1));
  const auto source = std::make_shared<int>(kAnyRank);
  float word = 0;
  return rank.transfer(rank.collectives->receive({&word, 1}, Dtype::kFloat32, 1, 0, source));
}

// Keeps the longest of the times that several threads take.
class Slowest {
 public:
  void take(milliseconds time) {
    const std::lock_guard lock(mutex_);
    time_ = std::max(time_, time);
  }
  milliseconds time() const { return time_; }  // call it once the threads are joined

 private:
  std::mutex mutex_;
  milliseconds time_{0};
};

milliseconds cpu_of_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto time = [](const timeval& value) {
    return std::chrono::seconds(value.tv_sec) + std::chrono::microseconds(value.tv_usec);
  };
  return std::chrono::duration_cast<milliseconds>(time(usage.ru_utime) + time(usage.ru_stime));
}

TEST(NodeFailure, AnAlltoallIsNeverSelfSufficient) {
  run_node({.size = 1}, [](NodeRank& rank) {
    float in = 0, out = 0;
    EXPECT_FALSE(
        rank.collectives->alltoall(1, {{&in, 1}}, {{&out, 1}}, Dtype::kFloat32)->self_sufficient());
    EXPECT_TRUE(
        rank.collectives->allgather(1, {&in, 1}, {{&out, 1}}, Dtype::kFloat32)->self_sufficient());
  });
}

// A poll that copied a gibibyte would delay an abort. So each poll copies only a slice.
TEST(NodeFailure, ALongTransferIsMovedInSlices) {
  constexpr size_t kCount = (size_t{40} << 20) / sizeof(float);
  TestNode node({.size = 2, .segment_bytes = size_t{84} << 20});
  NodeRank first(node, 0), second(node, 1);
  const auto polls = [](const OperationPtr& mine, const OperationPtr& theirs) {
    mine->begin();
    theirs->begin();
    int count = 1;
    while (mine->poll() == progress::Progress::kActive) ++count;
    while (theirs->poll() == progress::Progress::kActive) continue;
    EXPECT_EQ(mine->poll(), progress::Progress::kDone);
    EXPECT_EQ(theirs->poll(), progress::Progress::kDone);
    return count;
  };
  auto* const data = reinterpret_cast<float*>(second.segment->allocate(2 * kCount * sizeof(float)));
  auto* const own = reinterpret_cast<float*>(first.segment->allocate(2 * kCount * sizeof(float)));
  std::fill_n(data, 2 * kCount, 2.0f);
  std::fill_n(own, 2 * kCount, 1.0f);
  std::vector<float> result(kCount);
  EXPECT_EQ(polls(first.collectives->broadcast(1, result.data(), kCount, Dtype::kFloat32, 1),
                  second.collectives->broadcast(1, data, kCount, Dtype::kFloat32, 1)),
            4);
  EXPECT_EQ(result, std::vector<float>(kCount, 2.0f));
  std::vector<float> other(kCount);
  const auto sum = [](NodeRank& rank, float* in, float* out) {
    return rank.collectives->reduce_scatter(2, {{in, kCount}, {in + kCount, kCount}}, out,
                                            Dtype::kFloat32, ReduceOp::kSum);
  };
  EXPECT_EQ(polls(sum(first, own, result.data()), sum(second, data, other.data())), 4);
  EXPECT_EQ(result, std::vector<float>(kCount, 3.0f));
  EXPECT_EQ(other, std::vector<float>(kCount, 3.0f));
}

// If the sender's data and the root's output are in segments, the sender makes the copy. Otherwise
// the root of the gather does.
TEST(NodeGather, SenderWritesSegmentDataToTheRoot) {
  constexpr size_t kBytes = kLarge * sizeof(float);
  for (const bool in_segment : {false, true}) {
    TestNode node({.size = 2});
    NodeRank root(node, 0), sender(node, 1);
    std::vector<float> own(kLarge, 1.0f);
    auto* const sent = reinterpret_cast<float*>(sender.segment->allocate(kBytes));
    std::fill_n(sent, kLarge, 2.0f);
    std::vector<float> ordinary(in_segment ? 0 : 2 * kLarge);
    float* const out =
        in_segment ? reinterpret_cast<float*>(root.segment->allocate(2 * kBytes)) : ordinary.data();
    std::fill_n(out, 2 * kLarge, 0.0f);
    const auto mine = root.collectives->gather(
        1, {own.data(), kLarge}, {{out, kLarge}, {out + kLarge, kLarge}}, Dtype::kFloat32, 0);
    const auto theirs = sender.collectives->gather(1, {sent, kLarge}, {}, Dtype::kFloat32, 0);
    theirs->begin();
    mine->begin();
    EXPECT_EQ(theirs->poll(), progress::Progress::kActive);
    EXPECT_EQ(out[2 * kLarge - 1], in_segment ? 2.0f : 0.0f);  // before the root polls
    while (mine->poll() != progress::Progress::kDone) theirs->poll();
    EXPECT_EQ(theirs->poll(), progress::Progress::kDone);
    EXPECT_EQ(std::vector<float>(out, out + kLarge), own);
    EXPECT_EQ(std::vector<float>(out + kLarge, out + 2 * kLarge), std::vector<float>(kLarge, 2.0f));
  }
}

TEST(NodeDeath, IsReportedToAllWaitersPromptly) {
  constexpr int kSize = 5;
  constexpr int kVictim = 2;
  using Make = std::function<OperationPtr(NodeRank&, void* data)>;
  const auto attempt = [](const Make& make) {
    Moment death;
    Slowest slowest;
    std::vector<std::string> texts(kSize);
    run_node({.size = kSize}, [&](NodeRank& rank) {
      EXPECT_FALSE(rank.run(rank.collectives->barrier(6)));
      if (rank.rank == kVictim) {
        std::this_thread::sleep_for(milliseconds(50));  // all other ranks sleep by now
        death.set();
        return rank.die();
      }
      std::vector<double> data(kLarge);
      const auto error = rank.run(make(rank, data.data()));
      slowest.take(death.since());
      texts[static_cast<size_t>(rank.rank)] = text_of(error);
      expect_error(ErrorKind::kDeath, {"#7", "rank 2 has died"}, error);
      expect_error(ErrorKind::kAborted, {"refused because the group failed earlier"},
                   [&] { rank.run(rank.collectives->barrier(8)); });
    });
    for (const size_t survivor : {1, 3, 4}) EXPECT_EQ(texts[survivor], texts[0]);
    return slowest.time();
  };
  const auto sum = [](size_t count) -> Make {
    return [count](NodeRank& rank, void* data) {
      return rank.collectives->allreduce(7, data, data, count, Dtype::kFloat32, ReduceOp::kSum);
    };
  };
  const Make barrier = [](NodeRank& rank, void*) { return rank.collectives->barrier(7); };
  for (const Make& make : {sum(100), sum(kLarge), barrier}) {
    expect_prompt([&] { return attempt(make); });
  }
}

// The failure monitor wakes the group when a process ends. The operation need not wait for its next
// check.
TEST(NodeDeath, IsFoundAfterAWakeForIt) {
  TestNode node({.size = 2});
  NodeRank own(node, 0), other(node, 1);
  float value = 0;
  const auto sum =
      own.collectives->allreduce(1, &value, &value, 1, Dtype::kFloat32, ReduceOp::kSum);
  const auto message =
      own.collectives->receive({&value, 1}, Dtype::kFloat32, 1, 0, std::make_shared<int>(kAnyRank));
  for (progress::Operation* const operation : {sum.get(), message.get()}) {
    operation->begin();
    EXPECT_EQ(operation->poll(), progress::Progress::kIdle);
  }
  other.die();
  const auto sleep = [&] { return sum->sleep(Clock::now(), /*polled=*/true); };
  EXPECT_EQ(sleep(), progress::Slept::kTimedOut);
  own.shm_group->wake_for_end();
  expect_error(ErrorKind::kDeath, {"rank 1 has died"}, sleep);
  expect_error(ErrorKind::kDeath, {"rank 1 has died"}, [&] { message->poll(); });
}

// The kernel marks a life sign before the process has ended.
TEST(NodeDeath, IsFoundByTheLifeSignOfAProcessThatHasNotEnded) {
  TestNode node({.size = 3});
  NodeRank own(node, 0), other(node, 1), living(node, 2);
  std::vector<int> found;
  own.shm_group->on_death([&](int rank) { found.push_back(rank); });
  float value = 0;
  const auto sum =
      own.collectives->allreduce(1, &value, &value, 1, Dtype::kFloat32, ReduceOp::kSum);
  const auto message =
      own.collectives->receive({&value, 1}, Dtype::kFloat32, 1, 0, std::make_shared<int>(kAnyRank));
  for (progress::Operation* const operation : {sum.get(), message.get()}) {
    operation->begin();
    EXPECT_EQ(operation->poll(), progress::Progress::kIdle);
  }
  control_of(node.regions[1]).life.holder = FUTEX_OWNER_DIED;
  const auto wait = [](progress::Operation& operation) {
    while (operation.poll() == progress::Progress::kIdle) {
      operation.sleep(Clock::now() + milliseconds(10), /*polled=*/false);
    }
  };
  expect_error(ErrorKind::kDeath, {"allreduce #1", "rank 1 has died"}, [&] { wait(*sum); });
  EXPECT_EQ(found, std::vector<int>{1});
  EXPECT_EQ(own.shm_group->dead(), std::vector<int>{1});
  expect_error(ErrorKind::kDeath, {"rank 1 has died"}, [&] { wait(*message); });
}

// A rank leaves the group before its process ends.
TEST(NodeDeath, IsNoDeathIfTheRankHadLeft) {
  TestNode node({.size = 2});
  NodeRank own(node, 0), other(node, 1);
  const auto barrier = own.collectives->barrier(1);
  barrier->begin();
  other.shm_group->leave();
  control_of(node.regions[1]).life.holder = FUTEX_OWNER_DIED;
  EXPECT_EQ(own.shm_group->dead(), std::vector<int>());
  expect_error(ErrorKind::kPeer, {"was destroyed on a rank that this one waits for, rank 1"}, [&] {
    while (barrier->poll() == progress::Progress::kIdle) {
      barrier->sleep(Clock::now() + milliseconds(10), /*polled=*/false);
    }
  });
}

// The wake comes at any moment: before the sleep, while it polls, or while it sleeps.
TEST(NodeDeath, AWakeForItIsNeverMissed) {
  for (int turn = 0; turn < 300; ++turn) {
    TestNode node({.size = 2});
    NodeRank own(node, 0), other(node, 1);
    const auto barrier = own.collectives->barrier(1);
    barrier->begin();
    const uint32_t seen = own.shm_group->ends();
    std::thread waker([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(turn));
      own.shm_group->wake_for_end();
    });
    const auto until = Clock::now() + kTimeout;
    while (own.shm_group->ends() == seen) EXPECT_FALSE(own.shm_group->sleep(until, seen));
    waker.join();
    ASSERT_LT(Clock::now(), until) << "it slept to the end";
  }
}

TEST(NodeDeath, AfterItsPartIsHarmless) {
  for (const size_t count : {size_t{0}, size_t{100}}) {
    run_node({.size = 4}, [count](NodeRank& rank) {
      std::vector<float> data(count, 1.0f);
      const auto sum = rank.collectives->allreduce(1, data.data(), data.data(), count,
                                                   Dtype::kFloat32, ReduceOp::kSum);
      if (rank.rank == 1) {
        sum->begin();
        return rank.die();
      }
      std::this_thread::sleep_for(milliseconds(20 * rank.rank));
      const auto error = rank.run(rank.collectives->allreduce(1, data.data(), data.data(), count,
                                                              Dtype::kFloat32, ReduceOp::kSum));
      EXPECT_FALSE(error) << text_of(error);
      EXPECT_EQ(data, std::vector<float>(count, 4.0f));
      expect_error(ErrorKind::kDeath, {"barrier #2", "rank 1 has died"},
                   rank.run(rank.collectives->barrier(2)));
    });
  }
}

TEST(NodeDeath, EndsTransfersThatWaitForIt) {
  const auto attempt = [](size_t count) {
    Moment death;
    Slowest slowest;
    run_node({.size = 3}, [&](NodeRank& rank) {
      std::vector<float> data(count, static_cast<float>(rank.rank));
      const auto source = std::make_shared<int>(kAnyRank);
      const auto receive = [&](int from) {
        return rank.transfer(
            rank.collectives->receive({data.data(), count}, Dtype::kFloat32, from, 1, source));
      };
      if (rank.rank == 1) {
        if (count == 10) {
          rank.transfer(rank.collectives->send({data.data(), count}, Dtype::kFloat32, 0, 1));
        }
        std::this_thread::sleep_for(milliseconds(30));
        death.set();
        return rank.die();
      }
      if (rank.rank == 0) {
        if (count == 10) {
          EXPECT_FALSE(receive(1));  // the dead rank's message is still in the mailbox
          EXPECT_EQ(data[0], 1.0f);
        }
        expect_error(ErrorKind::kDeath, {"send/recv with tag 1", "rank 1 has died"}, receive(1));
      } else {
        const auto error = count == 10 ? receive(kAnyRank)
                                       : rank.transfer(rank.collectives->send(
                                             {data.data(), count}, Dtype::kFloat32, 1, 1));
        expect_error(ErrorKind::kDeath, {"send/recv with tag 1", "rank 1 has died"}, error);
      }
      slowest.take(death.since());
    });
    return slowest.time();
  };
  for (const size_t count : {10, 100'000}) expect_prompt([&] { return attempt(count); });
}

TEST(NodeDeath, IsDetectedBehindATransferWithALiveRank) {
  expect_prompt([] {
    std::barrier<> end(2);
    milliseconds took{0};
    run_node({.size = 3}, [&](NodeRank& rank) {
      if (rank.rank == 2) return rank.die();
      if (rank.rank == 0) {
        float from_living = 0, from_dead = 0;
        const auto source = std::make_shared<int>(kAnyRank);
        const auto waits = rank.transfers->enqueue(
            rank.collectives->receive({&from_living, 1}, Dtype::kFloat32, 1, 1, source), kTimeout,
            {});
        Moment start;
        start.set();
        expect_error(ErrorKind::kDeath, {"rank 2 has died"},
                     rank.transfer(rank.collectives->receive({&from_dead, 1}, Dtype::kFloat32, 2, 1,
                                                             source)));
        took = start.since();
      }
      end.arrive_and_wait();
    });
    return took;
  });
}

TEST(NodeFailure, OfOneRankWakesTheOthers) {
  expect_prompt([] {
    Moment failure;
    Slowest slowest;
    run_node({.size = 4}, [&](NodeRank& rank) {
      if (rank.rank == 3) {
        std::this_thread::sleep_for(milliseconds(50));
        failure.set();
        EXPECT_EQ(rank.shm_group->report("out of paint", false), "out of paint");
        EXPECT_EQ(rank.shm_group->report("out of brushes", true), "out of paint");
        EXPECT_TRUE(rank.shm_group->failed());
        return;
      }
      const auto error = receive_or_barrier(rank);
      expect_error(ErrorKind::kPeer, {"the test's group has failed: out of paint"}, error);
      slowest.take(failure.since());
    });
    return slowest.time();
  });
}

TEST(NodeFailure, ALateRankHarmsThoseWhoGaveUp) {
  for (const size_t count : {size_t{100}, kLarge}) {
    run_node({.size = 2}, [count](NodeRank& rank) {
      std::vector<float> data(count);
      const auto sum = [&](uint64_t sequence) {
        return rank.collectives->allreduce(sequence, data.data(), data.data(), count,
                                           Dtype::kFloat32, ReduceOp::kSum);
      };
      if (rank.rank == 0) {
        return expect_error(ErrorKind::kTimeout, {"timed out after 50 ms", "missing ranks: 1"},
                            rank.run(sum(1), milliseconds(50)));
      }
      while (!rank.shm_group->failed()) std::this_thread::sleep_for(milliseconds(1));
      auto error = rank.run(sum(1));
      if (count == 100) {
        EXPECT_FALSE(error) << text_of(error);  // rank 0's data had arrived
        error = rank.run(sum(2));
      }
      expect_error(ErrorKind::kPeer, {"timed out after 50 ms", "missing ranks: 1"}, error);
    });
  }
}

TEST(NodeFailure, AbortReachesASleeper) {
  expect_prompt([] {
    Slowest slowest;
    std::barrier<> end(3);
    run_node({.size = 3}, [&](NodeRank& rank) {
      if (rank.rank == 2) return end.arrive_and_wait();  // never comes
      Moment abort;
      std::thread other([&] {
        std::this_thread::sleep_for(milliseconds(50));
        abort.set();
        rank.ordered->abort("enough");
        rank.transfers->abort("enough");
      });
      const auto error = receive_or_barrier(rank);
      slowest.take(abort.since());
      expect_error(ErrorKind::kAborted, {"was cancelled: enough"}, error);
      other.join();
      end.arrive_and_wait();
    });
    return slowest.time();
  });
}

TEST(NodeFailure, OrphanedOperationReportsIfPeersMayWrite) {
  run_node({.size = 1}, [](NodeRank& rank) {
    constexpr size_t kBytes = kLarge * sizeof(float);
    std::vector<float> own(kLarge);
    void* const shared = rank.segment->allocate(kBytes);
    const auto peers_may_write = [&rank](void* in, void* out) {
      const auto sum =
          rank.collectives->allreduce(1, in, out, kLarge, Dtype::kFloat32, ReduceOp::kSum);
      sum->begin();
      sum->abandon();
      return sum->peers_may_write();
    };
    EXPECT_TRUE(peers_may_write(shared, shared));
    EXPECT_FALSE(peers_may_write(own.data(), own.data()));
    EXPECT_FALSE(peers_may_write(shared, own.data()));
  });
}

TEST(NodeFailure, OrphanedRootReportsIfPeersMayWrite) {
  run_node({.size = 2}, [](NodeRank& rank) {
    std::vector<float> own(kLarge), result(2 * kLarge);
    auto* const shared =
        reinterpret_cast<float*>(rank.segment->allocate(2 * kLarge * sizeof(float)));
    const auto peers_may_write = [&](const float* in, float* out) {
      const std::vector<Sink> sinks = {{out, kLarge}, {out + kLarge, kLarge}};
      const auto gather = rank.collectives->gather(
          1, {in, kLarge}, rank.rank == 0 ? sinks : std::vector<Sink>{}, Dtype::kFloat32, 0);
      gather->begin();
      gather->abandon();
      return gather->peers_may_write();
    };
    const bool is_root = rank.rank == 0;
    EXPECT_EQ(peers_may_write(own.data(), is_root ? shared : result.data()), is_root);
    EXPECT_FALSE(peers_may_write(shared, result.data()));
  });
}

class NodeSleep : public testing::TestWithParam<bool> {};

TEST_P(NodeSleep, CostsLittleAndEndsPromptly) {
  constexpr milliseconds kLate{200};
  expect_prompt([&] {
    Moment arrival;
    Slowest slowest;
    run_node({.size = 8, .oversubscribed = GetParam()}, [&](NodeRank& rank) {
      std::vector<float> data(100);
      const auto sum = [&](uint64_t sequence) {
        return rank.collectives->allreduce(sequence, data.data(), data.data(), data.size(),
                                           Dtype::kFloat32, ReduceOp::kSum);
      };
      EXPECT_FALSE(rank.run(sum(1)));
      const milliseconds before = cpu_of_thread();
      if (rank.rank == 0) {
        std::this_thread::sleep_for(kLate);
        arrival.set();
      }
      EXPECT_FALSE(rank.run(sum(2)));
      slowest.take(arrival.since());
      EXPECT_LT(cpu_of_thread() - before, kLate / 5);
    });
    return slowest.time();
  });
}

INSTANTIATE_TEST_SUITE_P(Crowds, NodeSleep, testing::Bool(), [](const auto& info) {
  return info.param ? "oversubscribed" : "a_core_for_each";
});

}  // namespace
}  // namespace hbm::communicator::shm
