// A synchronous operation on an idle queue, whose caller claims the queue and drives the operation;
// and the waits of a queue's progress thread.
#include <gtest/gtest.h>

#include <thread>

#include "expect_error.h"
#include "progress/operation_queue.h"
#include "queue_fixture.h"

namespace hbm::progress {
namespace {

TEST_F(QueueTest, ClaimedOperationRunsInTheCaller) {
  const auto op = ready_script("op");
  FakeOperation operation(op);
  std::string order;
  ASSERT_TRUE(queue_->try_claim("op"));
  queue_->run_claimed(operation, kLong, {[&] { order += "<"; }, [&] { order += ">"; }});
  EXPECT_EQ(op->begun_by, std::this_thread::get_id());
  EXPECT_EQ(op->polled_by, std::this_thread::get_id());
  EXPECT_EQ(order, "<>");
  EXPECT_FALSE(op->destroyed) << "the operation is the caller's";
  EXPECT_TRUE(idle());
}

TEST_F(QueueTest, OnlyAnIdleQueueIsClaimed) {
  const auto op = script("op");
  const auto request = submit(op);
  EXPECT_FALSE(queue_->try_claim("another"));
  op->ready = true;
  EXPECT_TRUE(wait(request));
  ASSERT_TRUE(eventually([this] { return queue_->try_claim("another"); }));
  EXPECT_FALSE(queue_->try_claim("a third"));
  queue_->unclaim();
}

TEST_F(QueueTest, RunsLaterOperationsAfterTheClaimedOne) {
  const auto first = script("first");
  const auto second = ready_script("second");
  FakeOperation operation(first);
  ASSERT_TRUE(queue_->try_claim("first"));
  RequestPtr request;
  std::thread other([&] {
    request = submit(second);
    EXPECT_FALSE(queue_->wait(request, Clock::now() + milliseconds(20)));
    EXPECT_FALSE(second->begun);
    first->ready = true;
  });
  queue_->run_claimed(operation, kLong);
  other.join();
  EXPECT_TRUE(wait(request));
  EXPECT_FALSE(request->error());
}

TEST_F(QueueTest, UnclaimReleasesTheQueue) {
  ASSERT_TRUE(queue_->try_claim("op"));
  const auto request = submit(ready_script("behind"));
  queue_->unclaim();
  EXPECT_TRUE(wait(request));
}

TEST_F(QueueTest, ErrorOfAClaimedOperationBreaksTheQueue) {
  const auto op = script("op");
  op->on_poll = []() -> Progress { throw Error(ErrorKind::kMismatch, "shapes differ"); };
  FakeOperation operation(op);
  ASSERT_TRUE(queue_->try_claim("op"));
  expect_error(ErrorKind::kMismatch, {"shapes differ"},
               [&] { queue_->run_claimed(operation, kLong); });
  EXPECT_TRUE(op->abandoned);
  EXPECT_EQ(failures().size(), 1U);
  expect_error(ErrorKind::kAborted, {"late was refused", "shapes differ"},
               [this] { queue_->try_claim("late"); });
}

TEST_F(QueueTest, AClaimedOperationTimesOut) {
  const auto op = script("op");
  op->missing = {3};
  FakeOperation operation(op);
  ASSERT_TRUE(queue_->try_claim("op"));
  expect_error(ErrorKind::kTimeout, {"op timed out after 20 ms", "waiting for 3"},
               [&] { queue_->run_claimed(operation, milliseconds(20)); });
}

TEST_F(QueueTest, AbortReachesAWaitingClaimedOperation) {
  const auto op = script("op");
  std::atomic<bool> asleep = false;
  op->on_sleep = [&](Clock::time_point until, bool) {
    asleep = true;
    const int seen = wakes_;
    while (wakes_ == seen && Clock::now() < until) std::this_thread::yield();
    return Slept::kWoken;
  };
  FakeOperation operation(op);
  ASSERT_TRUE(queue_->try_claim("op"));
  std::thread other([&] {
    EXPECT_TRUE(eventually([&] { return asleep.load(); }));
    queue_->abort("enough");
  });
  expect_error(ErrorKind::kAborted, {"op was cancelled: enough"},
               [&] { queue_->run_claimed(operation, kLong); });
  other.join();
  EXPECT_TRUE(op->abandoned);
  EXPECT_GT(wakes_, 0);
}

// Without oversubscription, a queue polls many times before it checks for an abort. But a poll with
// progress may have copied megabytes, so after such a poll the queue checks soon.
TEST(Queue, AbortEndsAClaimedOperationThatProgresses) {
  std::atomic<bool> woken = false;
  const auto queue =
      OperationQueue::create(OperationQueue::Order::kOrdered, /*oversubscribed=*/false,
                             {{}, {}, {}, [&] { woken = true; }, {}});
  const auto op = std::make_shared<Script>();
  std::thread other;
  int polls = 0;
  op->on_poll = [&] {
    if (++polls == 1) {
      other = std::thread([&] { queue->abort("enough"); });
      EXPECT_TRUE(eventually([&] { return woken.load(); }));
    }
    return Progress::kActive;
  };
  FakeOperation operation(op);
  ASSERT_TRUE(queue->try_claim("op"));
  expect_error(ErrorKind::kAborted, {"was cancelled: enough"},
               [&] { queue->run_claimed(operation, kLong); });
  other.join();
  EXPECT_EQ(polls, 2);
  queue->stop();
}

TEST_F(QueueTest, ErrorOfASleepFailsTheOperation) {
  const auto op = script("op");
  op->on_sleep = [](auto, bool) -> Slept { throw Error(ErrorKind::kDeath, "rank 2 has died"); };
  const auto request = submit(op, Mode::kSync);
  expect_error(ErrorKind::kDeath, {"rank 2 has died"}, request->error());
  EXPECT_TRUE(op->abandoned);
}

TEST_F(QueueTest, WaitsEndAtTheDeadline) {
  const auto op = script("op");
  op->on_sleep = [](Clock::time_point until, bool) {
    EXPECT_LE(until, Clock::now() + milliseconds(1000));
    std::this_thread::sleep_until(until);
    return Slept::kTimedOut;
  };
  const auto request = enqueue(op);
  EXPECT_FALSE(queue_->wait(request, Clock::now() + milliseconds(30)));
  op->ready = true;
  EXPECT_TRUE(wait(request));
}

TEST_F(QueueTest, SleepsAfterManyPollsOfAPolledOperation) {
  const auto op = script("op");
  int sleeps = 0;
  op->on_sleep = [&](Clock::time_point until, bool polled) {
    if (!polled) return Slept::kNoWakeup;
    EXPECT_LE(until, Clock::now() + milliseconds(1));
    if (++sleeps == 3) op->ready = true;
    return Slept::kWoken;
  };
  EXPECT_EQ(submit(op, Mode::kSync)->error(), nullptr);
  EXPECT_EQ(sleeps, 3);
}

TEST_F(QueueTest, KeepsTensorsThatPeersMayWrite) {
  for (const bool peers_may_write : {false, true}) {
    const auto queue =
        OperationQueue::create(OperationQueue::Order::kOrdered, /*oversubscribed=*/true, {});
    const auto tensor = std::make_shared<int>(7);
    const std::weak_ptr<int> watched = tensor;
    const auto op = script("op");
    op->peers_may_write = peers_may_write;
    {
      const auto held = tensor;
      const auto request =
          queue->enqueue(std::make_unique<FakeOperation>(op), milliseconds(10), {[] {}, [held] {}});
      queue->launch(request, Mode::kSync);
      EXPECT_TRUE(request->error());
    }
    queue->stop();
    EXPECT_EQ(watched.use_count() - 1, peers_may_write ? 1 : 0);
  }
}

TEST_F(UnorderedQueueTest, NewOperationWakesTheProgressThread) {
  const auto waiting = script("waiting");
  std::atomic<bool> asleep = false;
  waiting->on_sleep = [&](Clock::time_point until, bool) {
    asleep = true;
    const int seen = wakes_;
    while (wakes_ == seen && Clock::now() < until) std::this_thread::yield();
    return Slept::kWoken;
  };
  const auto first = submit(waiting);
  ASSERT_TRUE(eventually([&] { return asleep.load(); }));
  const auto second = submit(ready_script("second"));
  EXPECT_TRUE(wait(second));
  EXPECT_GT(wakes_, 0);
  waiting->ready = true;
  EXPECT_TRUE(wait(first));
}

}  // namespace
}  // namespace hbm::progress
