// Many threads, random delays: every operation ends once, and nothing hangs.
#include <gtest/gtest.h>

#include <random>

#include "base/error.h"
#include "progress/operation_queue.h"
#include "queue_fixture.h"
#include "seeds.h"

namespace hbm::progress {
namespace {

constexpr int kThreads = 6;
constexpr milliseconds kRunFor{700};

// Returns the script of an operation that takes a random number of polls. In one operation of eight
// each poll is slow.
std::shared_ptr<Script> random_script(std::mt19937_64& random) {
  const auto op = script("op", random() % 2 == 0);
  op->on_poll = [left = random() % 30, slow = random() % 8 == 0]() mutable {
    if (slow) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (left == 0) return Progress::kDone;
    return --left % 3 == 0 ? Progress::kActive : Progress::kIdle;
  };
  return op;
}

class QueueStress : public QueueTest, public testing::WithParamInterface<OperationQueue::Order> {
 protected:
  QueueStress() : QueueTest(GetParam()) {}

  // Issues one operation in a random mode. At random, waits for it, tests it, or leaves it.
  void one(std::mt19937_64& random) {
    const auto request =
        submit(random_script(random), random() % 3 == 0 ? Mode::kSync : Mode::kAsync);
    if (random() % 4 == 0) {
      ++callbacks_due_;
      queue_->when_done(request, [this] { ++callbacks_; });
    }
    switch (random() % 4) {
      case 0:
        EXPECT_TRUE(wait(request));
        break;
      case 1:
        queue_->wait(request, Clock::now() + std::chrono::microseconds(random() % 300));
        break;
      case 2:
        queue_->test(request);
        break;
      default:
        break;
    }
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }

  // Issues operations on several threads until the queue breaks or the time is over. Calls
  // `meanwhile` on this thread.
  void run(const std::function<void()>& meanwhile) {
    const uint64_t seed = test_seed();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, seed, t] {
        std::mt19937_64 random(seed + static_cast<uint64_t>(t));
        const Clock::time_point end = Clock::now() + kRunFor;
        try {
          while (Clock::now() < end) one(random);
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kAborted) << error.what();
        }
      });
    }
    meanwhile();
    for (std::thread& thread : threads) thread.join();
  }

  std::atomic<int> callbacks_due_ = 0;
  std::atomic<int> callbacks_ = 0;
  std::mutex mutex_;  // guards requests_ until the threads are joined
  std::vector<RequestPtr> requests_;
};

TEST_P(QueueStress, AllOperationsEnd) {
  run([] {});
  for (const auto& request : requests_) {
    EXPECT_TRUE(wait(request));
    EXPECT_FALSE(request->error());
  }
  EXPECT_TRUE(eventually([this] { return idle() && callbacks_ == callbacks_due_; }));
}

TEST_P(QueueStress, AllOperationsEndAfterAnAbort) {
  run([this] {
    std::this_thread::sleep_for(kRunFor / 3);
    std::thread aborts([this] { queue_->abort("enough"); });
    queue_->stop();
    aborts.join();
  });
  for (const auto& request : requests_) EXPECT_TRUE(request->done());
  EXPECT_TRUE(eventually([this] { return callbacks_ == callbacks_due_; }));
}

INSTANTIATE_TEST_SUITE_P(Orders, QueueStress,
                         testing::Values(OperationQueue::Order::kOrdered,
                                         OperationQueue::Order::kUnordered),
                         [](const auto& info) {
                           return info.param == OperationQueue::Order::kOrdered ? "Ordered"
                                                                                : "Unordered";
                         });

}  // namespace
}  // namespace hbm::progress
