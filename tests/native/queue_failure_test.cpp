// Errors, timeouts, abort() and stop(): the end of an operation, and of its queue.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "progress/operation_queue.h"
#include "queue_fixture.h"

namespace hbm::progress {
namespace {

[[noreturn]] void fail() { throw Error(ErrorKind::kMismatch, "shapes differ"); }

TEST_F(QueueTest, ATimeoutNamesTheOperationAndTheRanks) {
  const auto op = script("allreduce #7");
  op->missing = {2, 5};
  const Clock::time_point start = Clock::now();
  const auto request = submit(op, Mode::kSync, milliseconds(30));
  EXPECT_GE(Clock::now() - start, milliseconds(30));
  expect_error(ErrorKind::kTimeout, {"allreduce #7 timed out after 30 ms", "waiting for 2 5"},
               request->error());
  EXPECT_TRUE(op->abandoned && op->destroyed);
  EXPECT_EQ(failures(), std::vector{request->error()});
}

TEST_F(QueueTest, TheTimeoutCountsFromBegin) {
  const auto first = script("first");
  const auto first_ticket = submit(first);
  const auto second = script("second");
  const auto second_ticket = submit(second, Mode::kAsync, milliseconds(100));
  std::this_thread::sleep_for(milliseconds(150));
  EXPECT_FALSE(second->begun);
  second->ready = true;
  first->ready = true;
  EXPECT_TRUE(wait(second_ticket));
  EXPECT_FALSE(second_ticket->error());
}

TEST_F(QueueTest, AnErrorBreaksAnOrderedQueue) {
  const auto bad = script("bad");
  const auto behind = script("behind");
  bad->on_poll = []() -> Progress { fail(); };
  const auto bad_ticket = enqueue(bad);
  const auto behind_ticket = enqueue(behind);
  queue_->launch(bad_ticket, Mode::kAsync);
  EXPECT_TRUE(wait(bad_ticket));
  EXPECT_TRUE(wait(behind_ticket));
  expect_error(ErrorKind::kMismatch, {"shapes differ"}, bad_ticket->error());
  expect_error(ErrorKind::kAborted, {"behind was cancelled", "shapes differ"},
               behind_ticket->error());
  EXPECT_TRUE(bad->abandoned);
  EXPECT_FALSE(behind->begun || behind->abandoned);
  EXPECT_TRUE(behind->destroyed);
  EXPECT_EQ(queue_->broken(), bad_ticket->error());
  expect_error(ErrorKind::kAborted, {"late was refused", "shapes differ"},
               [this] { enqueue(script("late")); });
}

TEST_F(UnorderedQueueTest, AFailureIsReportedBeforeItsOperationIsAbandoned) {
  const auto bad = script("bad");
  size_t reported = 0;
  bad->on_poll = []() -> Progress { fail(); };
  bad->on_abandon = [&] { reported = failures().size(); };
  EXPECT_TRUE(wait(submit(bad)));
  EXPECT_EQ(reported, 1u);
}

TEST(QueueErrors, FailureOfAnyStepIsReported) {
  const auto begins = ready_script("begins");
  begins->on_begin = fail;
  struct Case {
    std::shared_ptr<Script> script;
    StagingHooks hooks;
  };
  for (const Case& each : {Case{begins, {}}, Case{ready_script("prologue"), {fail, {}}},
                           Case{ready_script("epilogue"), {{}, fail}}}) {
    const auto queue = OperationQueue::create(OperationQueue::Order::kOrdered, true, {});
    const auto request =
        queue->enqueue(std::make_unique<FakeOperation>(each.script), kLong, each.hooks);
    queue->launch(request, Mode::kSync);
    EXPECT_TRUE(request->done());
    expect_error(ErrorKind::kMismatch, {"shapes differ"}, request->error());
    queue->stop();
  }
}

TEST_F(UnorderedQueueTest, AnErrorFailsTheOperationAlone) {
  const auto bad = script("bad");
  const auto good = script("good");
  const auto silent = script("silent");
  bad->on_poll = []() -> Progress { fail(); };
  const auto good_ticket = enqueue(good);
  const auto bad_ticket = enqueue(bad);
  const auto silent_ticket = enqueue(silent, milliseconds(20));
  EXPECT_TRUE(wait(bad_ticket));
  EXPECT_TRUE(wait(silent_ticket));
  expect_error(ErrorKind::kMismatch, {"shapes differ"}, bad_ticket->error());
  expect_error(ErrorKind::kTimeout, {"silent timed out"}, silent_ticket->error());
  EXPECT_FALSE(good_ticket->done());
  EXPECT_FALSE(queue_->broken());
  good->ready = true;
  EXPECT_TRUE(wait(good_ticket));
  EXPECT_FALSE(good_ticket->error());
}

TEST_F(UnorderedQueueTest, ExceptionOfBeginIsThrownByEnqueue) {
  const auto bad = script("bad");
  bad->on_begin = fail;
  expect_error(ErrorKind::kMismatch, {"shapes differ"}, [&] { enqueue(bad); });
  EXPECT_TRUE(bad->abandoned);
  EXPECT_TRUE(bad->destroyed);
  EXPECT_TRUE(idle());
  EXPECT_FALSE(queue_->broken());
}

TEST_F(QueueTest, TheWatchBreaksAnOrderedQueue) {
  watch_ = [](const std::vector<int>& missing) {
    EXPECT_EQ(missing, std::vector{3});
    throw Error(ErrorKind::kPeer, "rank 3 has failed");
  };
  const auto op = script("op");
  op->missing = {3};
  const auto request = enqueue(op);
  const auto behind_ticket = enqueue(script("behind"));
  EXPECT_TRUE(wait(request));
  EXPECT_TRUE(wait(behind_ticket));
  expect_error(ErrorKind::kPeer, {"rank 3 has failed"}, request->error());
  expect_error(ErrorKind::kAborted, {"behind was cancelled", "rank 3"}, behind_ticket->error());
  EXPECT_TRUE(op->abandoned);
}

TEST_F(QueueTest, ChangesAreWatchedSoon) {
  constexpr int kChanges = 200;  // the watches of 50 seconds without changes
  watch_ = [this](const std::vector<int>&) {
    if (changes_.fetch_add(1) == kChanges) throw Error(ErrorKind::kPeer, "rank 3 has failed");
  };
  changes_ = 1;
  const auto op = script("op");
  op->missing = {3};
  const auto begun = Clock::now();
  const auto request = enqueue(op);
  EXPECT_TRUE(wait(request));
  expect_error(ErrorKind::kPeer, {"rank 3 has failed"}, request->error());
  EXPECT_LT(Clock::now() - begun, milliseconds(40'000));
}

TEST_F(UnorderedQueueTest, WatchFailsOnlyItsOperations) {
  watch_ = [](const std::vector<int>& missing) {
    if (missing == std::vector{3}) throw Error(ErrorKind::kPeer, "rank 3 has failed");
  };
  const auto good = script("good");
  good->missing = {2};
  const auto good_ticket = enqueue(good);
  std::vector<RequestPtr> bad;
  for (const char* name : {"first", "second"}) {
    const auto op = script(name);
    op->missing = {3};
    bad.push_back(enqueue(op));
  }
  for (const auto& request : bad) {
    EXPECT_TRUE(wait(request));
    expect_error(ErrorKind::kPeer, {"rank 3 has failed"}, request->error());
  }
  EXPECT_FALSE(good_ticket->done() || queue_->broken());
  good->ready = true;
  EXPECT_TRUE(wait(good_ticket));
  EXPECT_FALSE(good_ticket->error());
}

TEST_F(QueueTest, AbortWhileIdleAndTwice) {
  queue_->abort("the user said so");
  queue_->abort("and said it again");
  expect_error(ErrorKind::kAborted, {"the user said so"}, queue_->broken());
  expect_error(ErrorKind::kAborted, {"the user said so"}, [this] { enqueue(script("late")); });
  EXPECT_TRUE(failures().empty());
}

TEST_F(QueueTest, AbortReachesTheRunningThreadAndItsWaiters) {
  const auto first = script("first");
  const auto second = script("second");
  const auto first_ticket = enqueue(first);
  const auto second_ticket = enqueue(second);
  std::thread drives([&] { queue_->launch(first_ticket, Mode::kSync); });
  std::thread waits([&] { EXPECT_TRUE(wait(second_ticket)); });
  EXPECT_TRUE(eventually([&] { return first->begun.load(); }));
  std::thread aborts([&] { queue_->abort("stop now"); });
  queue_->abort("stop now");
  EXPECT_TRUE(first_ticket->done() && second_ticket->done());
  drives.join();
  waits.join();
  aborts.join();
  expect_error(ErrorKind::kAborted, {"first was cancelled: stop now"}, first_ticket->error());
  expect_error(ErrorKind::kAborted, {"second was cancelled: stop now"}, second_ticket->error());
  EXPECT_TRUE(first->abandoned);
  EXPECT_FALSE(second->begun);
}

TEST_F(QueueTest, StopFailsOperationsOfTheWorker) {
  const auto op = script("op");
  const auto request = submit(op);
  std::atomic<bool> called = false;
  queue_->when_done(request, [&] { called = true; });
  queue_->stop();
  queue_->stop();
  EXPECT_TRUE(request->done() && called && op->abandoned);
  expect_error(ErrorKind::kAborted, {"the group was destroyed"}, request->error());
}

TEST_F(QueueTest, ACallbackMayAbortAndStop) {
  const auto op = script("op");
  const auto behind = script("behind");
  const auto request = submit(op);
  const auto behind_ticket = submit(behind);
  queue_->when_done(request, [this] {
    queue_->abort("from a callback");
    queue_->stop();
  });
  op->ready = true;
  EXPECT_TRUE(eventually([&] { return behind_ticket->done(); }));
  expect_error(ErrorKind::kAborted, {"from a callback"}, behind_ticket->error());
}

TEST(QueueLifetime, CallbackMayDropTheLastReference) {
  auto queue = OperationQueue::create(OperationQueue::Order::kOrdered, true, {});
  const std::weak_ptr<OperationQueue> watched = queue;
  const auto op = script("op");
  const auto request = queue->enqueue(std::make_unique<FakeOperation>(op), kLong, {});
  queue->launch(request, Mode::kAsync);
  auto* const raw = queue.get();
  raw->when_done(request, [queue = std::move(queue)]() mutable {
    queue->stop();
    queue.reset();
  });
  op->ready = true;
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
}

}  // namespace
}  // namespace hbm::progress
