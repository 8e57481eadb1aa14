// The progress thread: which thread drives an operation, when, and in which order.
#include "progress/operation_queue.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect_error.h"
#include "progress/backoff.h"
#include "progress/tuning.h"
#include "queue_fixture.h"

namespace hbm::progress {
namespace {

const auto this_thread = [] { return std::this_thread::get_id(); };

TEST_F(QueueTest, SyncRunsOnTheCallersThread) {
  const auto op = ready_script("op");
  std::vector<std::string> steps;
  const auto note = [&](const char* step) {
    EXPECT_EQ(this_thread(), op->begun_by == std::thread::id{} ? this_thread() : op->begun_by);
    steps.push_back(step);
  };
  op->on_begin = [&] { note("begin"); };
  const auto request =
      submit(op, Mode::kSync, kLong, {[&] { note("prologue"); }, [&] { note("epilogue"); }});
  EXPECT_TRUE(request->done());
  EXPECT_FALSE(request->error());
  EXPECT_EQ(op->begun_by, this_thread());
  EXPECT_EQ(op->polled_by, this_thread());
  EXPECT_EQ(steps, (std::vector<std::string>{"prologue", "begin", "epilogue"}));
  EXPECT_TRUE(idle());
}

TEST_F(QueueTest, OrderedOneAfterTheOther) {
  std::vector<std::string> steps;  // without a lock: the queue orders the calls that write it
  std::vector<RequestPtr> requests;
  for (const char* name : {"a", "b", "c", "d"}) {
    const auto op = script(name, *name != 'c');
    op->on_begin = [&steps, name] { steps.push_back(std::string("begin ") + name); };
    op->on_poll = [&steps, name, polls = 0]() mutable {
      if (++polls < 5) return polls % 2 == 0 ? Progress::kActive : Progress::kIdle;
      steps.push_back(std::string("end ") + name);
      return Progress::kDone;
    };
    requests.push_back(submit(op));
  }
  EXPECT_TRUE(wait(requests.back()));
  for (const auto& request : requests) EXPECT_TRUE(request->done());
  EXPECT_EQ(steps, (std::vector<std::string>{"begin a", "end a", "begin b", "end b", "begin c",
                                             "end c", "begin d", "end d"}));
}

TEST_F(QueueTest, WaiterFinishesASelfSufficientOperation) {
  const auto op = script("op", /*self_sufficient=*/true);
  const Clock::time_point start = Clock::now();
  const auto request = submit(op);
  EXPECT_TRUE(op->begun);
  EXPECT_EQ(op->begun_by, this_thread());
  op->ready = true;
  EXPECT_TRUE(wait(request));
  if (Clock::now() - start < kTakeoverDelay) {
    EXPECT_EQ(op->polled_by, this_thread());
  }
}

TEST_F(QueueTest, BeginsAtIssueBehindACompleteOperation) {
  const auto first = script("first", /*self_sufficient=*/true);
  const auto second = script("second", /*self_sufficient=*/true);
  const auto first_ticket = submit(first);
  first->ready = true;
  const Clock::time_point start = Clock::now();
  const auto second_ticket = submit(second);
  if (Clock::now() - start < kTakeoverDelay) {
    EXPECT_TRUE(first_ticket->done());
    EXPECT_EQ(second->begun_by, this_thread());
  }
  EXPECT_TRUE(second->begun);
  second->ready = true;
  EXPECT_TRUE(wait(second_ticket));
}

TEST_F(QueueTest, WorkerDrivesOtherOperationsImmediately) {
  const auto op = script("op");
  const auto request = submit(op);
  EXPECT_TRUE(eventually([&] { return op->begun.load(); }));
  op->ready = true;
  EXPECT_TRUE(eventually([&] { return request->done(); }));
  EXPECT_NE(op->polled_by, this_thread());
}

TEST_F(QueueTest, WorkerTakesOverUnawaitedOperations) {
  for (int round = 0; round < 2; ++round) {  // with a new worker, then with a lingering one
    const auto op = script("op", /*self_sufficient=*/true);
    const Clock::time_point start = Clock::now();
    const auto request = submit(op);
    op->ready = true;
    EXPECT_TRUE(eventually([&] { return request->done(); }));
    EXPECT_GE(Clock::now() - start, kTakeoverDelay);
    EXPECT_NE(op->polled_by, this_thread());
  }
}

TEST_F(QueueTest, TestPollsOnce) {
  const auto op = script("op", /*self_sufficient=*/true);
  const auto request = submit(op);
  EXPECT_FALSE(queue_->test(request));
  op->ready = true;
  EXPECT_TRUE(eventually([&] { return queue_->test(request); }));
}

TEST_F(QueueTest, WaitMayEndBeforeTheOperation) {
  const auto op = script("op", /*self_sufficient=*/true);
  const auto request = submit(op);
  const Clock::time_point start = Clock::now();
  EXPECT_FALSE(queue_->wait(request, start + milliseconds(20)));
  EXPECT_GE(Clock::now() - start, milliseconds(20));
  EXPECT_FALSE(request->done());
  EXPECT_FALSE(op->abandoned);
  op->ready = true;
  EXPECT_TRUE(wait(request));
  EXPECT_FALSE(request->error());
}

TEST_F(QueueTest, WaitersDeadlineHoldsWhileAnotherThreadRuns) {
  const auto op = script("op");
  const auto request = enqueue(op);
  std::thread driver([&] { queue_->launch(request, Mode::kSync); });
  EXPECT_TRUE(eventually([&] { return op->begun.load(); }));
  EXPECT_FALSE(queue_->wait(request, Clock::now() + milliseconds(20)));
  op->ready = true;
  driver.join();
  EXPECT_TRUE(request->done());
}

TEST_F(QueueTest, RemainingWaiterTakesOver) {
  const auto first = script("first");
  const auto second = script("second");
  const auto first_ticket = enqueue(first);
  const auto second_ticket = enqueue(second);
  std::thread waits_for_second([&] { EXPECT_TRUE(wait(second_ticket)); });
  std::thread waits_for_first([&] { EXPECT_TRUE(wait(first_ticket)); });
  EXPECT_TRUE(eventually([&] { return first->begun.load(); }));
  first->ready = true;
  waits_for_first.join();
  EXPECT_TRUE(eventually([&] { return second->begun.load(); }));
  second->ready = true;
  waits_for_second.join();
}

TEST_F(QueueTest, ReleasesTheOperationBeforeItIsDone) {
  const auto op = ready_script("op");
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = held;
  const auto request = submit(op, Mode::kSync, kLong, {[held = std::move(held)] {}, [] {}});
  EXPECT_TRUE(op->destroyed);
  EXPECT_TRUE(watched.expired());
}

TEST_F(QueueTest, CallbackOfADoneRequestRunsImmediately) {
  const auto request = submit(ready_script("op"), Mode::kSync);
  std::thread::id by;
  queue_->when_done(request, [&] { by = this_thread(); });
  EXPECT_EQ(by, this_thread());
}

TEST_F(QueueTest, CallbacksRunInOrderWithoutAWaiter) {
  const auto op = script("op", /*self_sufficient=*/true);
  const auto request = submit(op);
  std::vector<int> order;
  std::atomic<int> called = 0;
  for (int i = 0; i < 3; ++i) {
    queue_->when_done(request, [&, i] {
      EXPECT_TRUE(request->done());
      order.push_back(i);
      ++called;
    });
  }
  EXPECT_EQ(called, 0);
  op->ready = true;
  EXPECT_TRUE(eventually([&] { return called == 3; }));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

TEST_F(QueueTest, CallbacksMayEnqueueAndWait) {
  std::atomic<int> left = 100;
  std::function<void()> next = [&] {
    if (--left <= 0) return;
    submit(ready_script("inner"), Mode::kSync);
    const auto op = script("chained", left % 2 == 0);
    const auto request = submit(op);
    queue_->when_done(request, next);
    op->ready = true;
  };
  next();
  EXPECT_TRUE(eventually([&] { return left <= 0 && idle(); }));
  EXPECT_FALSE(queue_->broken());
}

TEST_F(QueueTest, DestroysCallbacksWithoutTheLock) {
  struct Waits {
    Waits(std::shared_ptr<OperationQueue> queue, std::atomic<bool>& gone)
        : queue(std::move(queue)), gone(gone) {}
    ~Waits() {
      EXPECT_FALSE(queue->broken());  // takes the queue's lock
      gone = true;
    }
    std::shared_ptr<OperationQueue> queue;
    std::atomic<bool>& gone;
  };
  std::atomic<bool> gone{false};
  const auto op = script("op");
  const auto request = submit(op);
  queue_->when_done(request, [held = std::make_shared<Waits>(queue_, gone)] {});
  op->ready = true;
  EXPECT_TRUE(wait(request));
  EXPECT_TRUE(eventually([&] { return gone.load(); }));
}

TEST_F(UnorderedQueueTest, BeginsInOrderAndEndsInAny) {
  const auto first = script("first");
  const auto second = script("second");
  const auto first_ticket = enqueue(first);
  const auto second_ticket = enqueue(second);
  EXPECT_TRUE(first->begun && second->begun);
  EXPECT_EQ(first->begun_by, this_thread());
  queue_->launch(first_ticket, Mode::kAsync);
  queue_->launch(second_ticket, Mode::kAsync);
  second->ready = true;
  EXPECT_TRUE(wait(second_ticket));
  EXPECT_FALSE(first_ticket->done());
  first->ready = true;
  EXPECT_TRUE(wait(first_ticket));
}

TEST_F(UnorderedQueueTest, ProgressThreadDrivesLaterOperations) {
  const auto first = script("first");
  std::atomic<int> polls = 0;
  first->on_poll = [&polls, op = first.get()] {
    ++polls;
    return op->ready ? Progress::kDone : Progress::kIdle;
  };
  const auto first_ticket = enqueue(first);
  std::thread driver([&] { queue_->launch(first_ticket, Mode::kSync); });
  EXPECT_TRUE(eventually([&] { return polls > 1; }));
  const auto second_ticket = enqueue(ready_script("second"));
  EXPECT_TRUE(eventually([&] { return second_ticket->done(); }));
  first->ready = true;
  driver.join();
}

TEST_F(UnorderedQueueTest, LeavesMessagesToTheirWaiters) {
  for (int round = 0; round < 20; ++round) {  // with a new worker, then with a lingering one
    const auto op = script("op");
    const Clock::time_point start = Clock::now();
    const auto request = submit(op);
    while (Clock::now() - start < kMessageTakeoverDelay / 2) {
    }
    op->ready = true;
    EXPECT_TRUE(wait(request));
    if (Clock::now() - start < kMessageTakeoverDelay) {
      EXPECT_EQ(op->polled_by, this_thread());
    }
  }
}

TEST_F(UnorderedQueueTest, WorkerTakesOverUnawaitedMessages) {
  for (int round = 0; round < 2; ++round) {
    const auto op = script("op");
    const Clock::time_point start = Clock::now();
    const auto request = submit(op);
    op->ready = true;
    EXPECT_TRUE(eventually([&] { return request->done(); }));
    EXPECT_GE(Clock::now() - start, kMessageTakeoverDelay);
    EXPECT_NE(op->polled_by, this_thread());
  }
}

TEST_F(UnorderedQueueTest, PollsIfOneOperationCannotWake) {
  const auto first = script("first");
  const auto second = script("second");  // by default, nothing would wake the sleeper
  std::atomic<int> sleeps = 0;
  first->on_sleep = [&](auto, bool) {
    ++sleeps;
    return Slept::kWoken;
  };
  const auto first_ticket = enqueue(first);
  const auto second_ticket = enqueue(second);
  EXPECT_FALSE(queue_->wait(second_ticket, Clock::now() + milliseconds(5)));
  EXPECT_EQ(sleeps, 0);
  second->ready = true;
  EXPECT_TRUE(wait(second_ticket));
  first->ready = true;
  EXPECT_TRUE(wait(first_ticket));
}

TEST_F(UnorderedQueueTest, SleepsForTheFirstIfAllWake) {
  const auto first = script("first");
  const auto second = script("second");
  first->on_sleep = [&](Clock::time_point until, bool polled) {
    EXPECT_FALSE(polled);
    EXPECT_GT(until, Clock::time_point::min());
    second->ready = true;
    return Slept::kWoken;
  };
  second->on_sleep = [](Clock::time_point until, bool) {
    EXPECT_EQ(until, Clock::time_point::min());  // the thread asks, and must not sleep here
    return Slept::kTimedOut;
  };
  const auto first_ticket = enqueue(first);
  EXPECT_TRUE(wait(enqueue(second)));
  first->ready = true;
  EXPECT_TRUE(wait(first_ticket));
}

TEST_F(QueueTest, AForkedChildsCallsAreRefused) {
  const auto running = submit(script("running"));  // so a worker drives at the time of the fork
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    expect_error(ErrorKind::kUnsupported, {"called in a forked child", "spawn"},
                 [this] { enqueue(script("childs")); });
    queue_->stop();
    _exit(HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Backoff, SleepsLongerUntilItIsReset) {
  for (const bool oversubscribed : {false, true}) {
    Backoff backoff(oversubscribed);
    const auto pause = [&backoff] {
      const Clock::time_point start = Clock::now();
      backoff.pause();
      return Clock::now() - start;
    };
    auto longest = pause();
    for (int i = 0; i < 10'000 && longest < milliseconds(1); ++i) longest = pause();
    EXPECT_GE(longest, milliseconds(1));
    EXPECT_TRUE(eventually([&] {
      backoff.reset();
      return pause() < milliseconds(1);  // true unless the thread was preempted
    }));
  }
}

// Returns the number of pauses until `backoff` calls its sleep function, which adds 1 to `sleeps`.
int pauses_before_a_sleep(Backoff& backoff, const int& sleeps) {
  const int before = sleeps;
  int pauses = 0;
  for (; sleeps == before && pauses < 10'000; ++pauses) backoff.pause();
  return pauses;
}

TEST(Backoff, PollsLessAfterWaitsThatSlept) {
  int sleeps = 0;
  Backoff backoff(/*oversubscribed=*/true, [&sleeps](auto) {
    ++sleeps;
    return Slept::kTimedOut;
  });
  int pauses = pauses_before_a_sleep(backoff, sleeps);
  EXPECT_LT(pauses, 1000);  // far fewer than without a sleep function
  for (int wait = 0; wait < 20; ++wait) {
    backoff.reset();
    pauses = pauses_before_a_sleep(backoff, sleeps);
  }
  EXPECT_LE(pauses, 10);  // 10, or fewer if the thread lost its processor
}

TEST(Backoff, SleepsAgainAfterAPartialWakeup) {
  int sleeps = 0;
  Backoff backoff(/*oversubscribed=*/true, [&sleeps](auto) {
    ++sleeps;
    return Slept::kWoken;
  });
  pauses_before_a_sleep(backoff, sleeps);
  auto longest = Clock::duration::zero();
  for (int turn = 0; turn < 10; ++turn) {
    const Clock::time_point start = Clock::now();
    const int before = sleeps;
    backoff.pause();
    EXPECT_EQ(sleeps, before);
    longest = std::max(longest, Clock::now() - start);
    backoff.pause();
    EXPECT_EQ(sleeps, before + 1);
  }
  EXPECT_GE(longest, milliseconds(1));
}

TEST(Backoff, ForgetsPartialWakeupsSoon) {
  int sleeps = 0;
  Backoff backoff(/*oversubscribed=*/true, [&sleeps](auto) {
    ++sleeps;
    return Slept::kWoken;
  });
  pauses_before_a_sleep(backoff, sleeps);
  for (int turn = 0; turn < 400; ++turn) backoff.pause();
  EXPECT_TRUE(eventually([&] {
    for (int moved = 0; moved < 4; ++moved) backoff.reset();
    pauses_before_a_sleep(backoff, sleeps);
    const Clock::time_point start = Clock::now();
    backoff.pause();
    return Clock::now() - start < milliseconds(1);  // true unless the thread was preempted
  }));
}

TEST(Backoff, PollsLongOnceNothingEndsASleep) {
  int sleeps = 0;
  Slept slept = Slept::kTimedOut;
  Backoff backoff(/*oversubscribed=*/false, [&](auto) {
    ++sleeps;
    return slept;
  });
  for (int wait = 0; wait < 10; ++wait) {
    pauses_before_a_sleep(backoff, sleeps);
    backoff.reset();
  }
  slept = Slept::kNoWakeup;
  const int looks = pauses_before_a_sleep(backoff, sleeps);
  rusage before{}, after{};
  getrusage(RUSAGE_THREAD, &before);
  for (int look = looks; look < 60; ++look) backoff.pause();  // these polls must not sleep
  getrusage(RUSAGE_THREAD, &after);
  EXPECT_EQ(after.ru_nvcsw, before.ru_nvcsw) << "it slept";
}

TEST(Backoff, SleepsAloneIfNothingEndsASleep) {
  int sleeps = 0;
  Backoff backoff(/*oversubscribed=*/true, [&sleeps](auto) {
    ++sleeps;
    return Slept::kNoWakeup;
  });
  auto longest = Clock::duration::zero();
  // A pause that only yields may be long, too, so the loop also waits for a sleep.
  for (int i = 0; i < 10'000 && (longest < milliseconds(1) || sleeps == 0); ++i) {
    const Clock::time_point start = Clock::now();
    backoff.pause();
    longest = std::max(longest, Clock::now() - start);
  }
  EXPECT_GE(longest, milliseconds(1));
  for (int i = 0; i < 100; ++i) backoff.pause();
  EXPECT_EQ(sleeps, 1);  // the sleep function is called once in a wait
}

}  // namespace
}  // namespace hbm::progress
