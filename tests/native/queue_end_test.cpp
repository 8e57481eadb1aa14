// The end of the process: each thread of a queue parks, except the one that ends the process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "base/error.h"
#include "base/process_end.h"
#include "queue_fixture.h"

namespace hbm::progress {
namespace {

// Runs `test` in a forked child, which calls exit() while its threads still run.
void in_child(const std::function<void()>& test) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    test();
    exit(testing::Test::HasFailure() ? 1 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 5);
}

std::shared_ptr<OperationQueue> make_queue() {
  return OperationQueue::create(OperationQueue::Order::kOrdered, /*oversubscribed=*/true, {});
}

// An operation that never ends, and counts its polls.
struct Endless {
  std::atomic<int> polls = 0;
  const std::shared_ptr<Script> script = std::make_shared<Script>();

  Endless() {
    script->on_poll = [this] {
      polls.fetch_add(1);
      return Progress::kIdle;
    };
  }
  std::unique_ptr<Operation> operation() const { return std::make_unique<FakeOperation>(script); }
};

TEST(QueueEnd, NoThreadPollsOrReturnsAfterTheEnd) {
  in_child([] {
    struct Shared {  // never destroyed: the threads refer to it until the process is gone
      const std::shared_ptr<OperationQueue> waited = make_queue();
      const std::shared_ptr<OperationQueue> claimed = make_queue();
      const std::shared_ptr<OperationQueue> worked = make_queue();
      Endless in_wait, in_claim, on_worker;
      std::atomic<int> returned = 0;
      std::atomic<bool> called = false;
    };
    auto& [waited, claimed, worked, in_wait, in_claim, on_worker, returned, called] = *new Shared;
    const auto request = waited->enqueue(in_wait.operation(), kLong, {});
    for (int i = 0; i < 2; ++i) {
      std::thread([&waited = waited, &returned = returned, request] {
        waited->wait(request, Clock::time_point::max());
        returned.fetch_add(1);
      }).detach();
    }
    std::thread([&claimed = claimed, &in_claim = in_claim, &returned = returned] {
      ASSERT_TRUE(claimed->try_claim("a test"));
      const auto operation = in_claim.operation();
      claimed->run_claimed(*operation, kLong);
      returned.fetch_add(1);
    }).detach();
    const auto driven = worked->enqueue(on_worker.operation(), kLong, {});
    worked->when_done(driven, [&called = called] { called = true; });
    const auto polls = [&a = in_wait.polls, &b = in_claim.polls, &c = on_worker.polls] {
      return std::array{a.load(), b.load(), c.load()};
    };
    ASSERT_TRUE(eventually([&] { return std::ranges::count(polls(), 0) == 0; }));

    EXPECT_FALSE(process_ends());
    end_process();
    EXPECT_TRUE(process_ends());
    EXPECT_FALSE(must_park());
    const auto before = polls();
    // The thread that ends the process can still run operations: it drives them without a worker.
    const auto own = make_queue();
    const auto ready = std::make_shared<Script>();
    ready->ready = true;
    const auto later = own->enqueue(std::make_unique<FakeOperation>(ready), kLong, {});
    own->launch(later, Mode::kAsync);
    bool completed = false;
    own->when_done(later, [&] { completed = true; });
    EXPECT_TRUE(completed);
    for (const auto& queue : {waited, claimed, worked, own}) queue->stop();
    EXPECT_EQ(polls(), before);
    EXPECT_EQ(returned, 0);
    EXPECT_FALSE(called);
  });
}

TEST(QueueEnd, WaitsForARunningCallback) {
  in_child([] {
    const auto queue = make_queue();
    const auto script = std::make_shared<Script>();
    struct Shared {  // never destroyed, as above
      std::atomic<bool> running = false;
      std::atomic<bool> ended = false;
    };
    auto& [running, ended] = *new Shared;
    const auto request = queue->enqueue(std::make_unique<FakeOperation>(script), kLong, {});
    queue->when_done(request, [&running = running, &ended = ended] {
      running = true;
      while (!process_ends()) std::this_thread::yield();
      ended = true;
    });
    script->ready = true;
    ASSERT_TRUE(eventually([&running = running] { return running.load(); }));
    end_process();
    EXPECT_TRUE(eventually([&ended = ended] { return ended.load(); }));
  });
}

// A progress thread may park while it drives its queue: in a hook, or in an operation of another
// queue.
TEST(QueueEnd, DoesNotAwaitAParkedProgressThread) {
  in_child([] {
    struct Shared {  // never destroyed, as above
      const std::shared_ptr<OperationQueue> claimed = make_queue();
      const std::shared_ptr<OperationQueue> other = make_queue();
      const std::shared_ptr<OperationQueue> failing =
          OperationQueue::create(OperationQueue::Order::kOrdered, /*oversubscribed=*/true,
                                 {{},
                                  [this](const Operation&, const std::exception_ptr& error) {
                                    explaining = true;
                                    while (!process_ends()) std::this_thread::yield();
                                    park_at_process_end();
                                    return error;
                                  },
                                  {},
                                  {},
                                  {}});
      Endless endless;
      std::atomic<bool> explaining = false;
    };
    auto& [claimed, other, failing, endless, explaining] = *new Shared;
    std::thread([&claimed = claimed, &other = other, &endless = endless] {
      ASSERT_TRUE(claimed->try_claim("a test"));
      other->wait(other->enqueue(endless.operation(), kLong, {}), Clock::time_point::max());
    }).detach();
    const auto script = std::make_shared<Script>();
    script->on_poll = []() -> Progress { throw std::runtime_error("a failure"); };
    const auto failed = failing->enqueue(std::make_unique<FakeOperation>(script), kLong, {});
    std::thread([&failing = failing, failed] {
      failing->wait(failed, Clock::time_point::max());
    }).detach();
    ASSERT_TRUE(eventually([&polls = endless.polls, &explaining = explaining] {
      return polls.load() > 0 && explaining.load();
    }));
    end_process();
    for (const auto& queue : {claimed, failing}) {
      const auto next = std::make_shared<Script>();
      const auto request = queue->enqueue(std::make_unique<FakeOperation>(next), kLong, {});
      EXPECT_THROW(queue->wait(request, Clock::time_point::max()), Error);
    }
  });
}

TEST(QueueEnd, AbortParksOnAnotherThread) {
  in_child([] {
    struct Shared {  // never destroyed, as above
      const std::shared_ptr<OperationQueue> queue = make_queue();
      Endless endless;
      std::atomic<const std::atomic<bool>*> parked = nullptr;
      std::atomic<bool> returned = false;
    };
    auto& [queue, endless, parked, returned] = *new Shared;
    queue->enqueue(endless.operation(), kLong, {});
    end_process();
    std::thread([&queue = queue, &parked = parked, &returned = returned] {
      parked = &parked_here();
      queue->abort("a test");
      returned = true;
    }).detach();
    EXPECT_TRUE(eventually([&parked = parked, &returned = returned] {
      return returned.load() || (parked.load() != nullptr && parked.load()->load());
    }));
    EXPECT_FALSE(returned);
  });
}

TEST(QueueEnd, WaitsForShortSections) {
  in_child([] {
    struct Shared {  // never destroyed, as above
      std::atomic<int> inside = 0;
      std::atomic<bool> ended = false;
    };
    auto& [inside, ended] = *new Shared;
    std::thread([&inside = inside, &ended = ended] {
      const ShortSection section;
      inside.fetch_add(1);
      while (!process_ends()) std::this_thread::yield();
      for (int i = 0; i < 20; ++i) std::this_thread::yield();
      ended = true;
    }).detach();
    std::thread([&inside = inside] {
      const ShortSection section;
      inside.fetch_add(1);
      while (!process_ends()) std::this_thread::yield();
      park_at_process_end();  // ends the section
    }).detach();
    ASSERT_TRUE(eventually([&inside = inside] { return inside.load() == 2; }));
    end_process();
    EXPECT_TRUE(ended);
  });
}

TEST(QueueEnd, ForkedChildEndsIndependently) {
  in_child([] {
    end_process();
    in_child([] {
      EXPECT_FALSE(process_ends());
      const auto queue = make_queue();
      const auto ready = std::make_shared<Script>();
      ready->ready = true;
      const auto request = queue->enqueue(std::make_unique<FakeOperation>(ready), kLong, {});
      bool called = false;
      queue->when_done(request, [] {});
      queue->launch(request, Mode::kSync);
      queue->when_done(request, [&] { called = true; });
      EXPECT_TRUE(called);
    });
  });
}

}  // namespace
}  // namespace hbm::progress
