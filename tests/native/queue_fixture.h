// A queue, a record of the calls of its hooks, and short names for the tests.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_operation.h"
#include "progress/operation_queue.h"

namespace hbm::progress {

using std::chrono::milliseconds;

inline constexpr milliseconds kLong{60'000};

class QueueTest : public testing::Test {
 protected:
  using RequestPtr = std::shared_ptr<Request>;

  explicit QueueTest(OperationQueue::Order order = OperationQueue::Order::kOrdered)
      : queue_(
            OperationQueue::create(order, /*oversubscribed=*/true,
                                   {[this](const Operation& waiting) { watch_(waiting.missing()); },
                                    {},
                                    [this](const std::exception_ptr& error) {
                                      const std::lock_guard lock(mutex_);
                                      failures_.push_back(error);
                                    },
                                    [this] { wakes_.fetch_add(1); },
                                    [](const std::vector<int>& ranks) {
                                      std::string text = "waiting for";
                                      for (const int rank : ranks)
                                        text += " " + std::to_string(rank);
                                      return text;
                                    },
                                    [this] { return changes_.load(); }})) {}
  ~QueueTest() override { queue_->stop(); }

  RequestPtr enqueue(const std::shared_ptr<Script>& script, milliseconds timeout = kLong,
                     StagingHooks hooks = {}) {
    return queue_->enqueue(std::make_unique<FakeOperation>(script), timeout, std::move(hooks));
  }

  RequestPtr submit(const std::shared_ptr<Script>& script, Mode mode = Mode::kAsync,
                    milliseconds timeout = kLong, StagingHooks hooks = {}) {
    auto request = enqueue(script, timeout, std::move(hooks));
    queue_->launch(request, mode);
    return request;
  }

  bool wait(const RequestPtr& request) { return queue_->wait(request, Clock::now() + kLong); }

  // Returns true if the queue is empty and no thread drives it. Throws if the queue is broken.
  bool idle() {
    if (!queue_->try_claim("a check")) return false;
    queue_->unclaim();
    return true;
  }

  std::vector<std::exception_ptr> failures() {
    const std::lock_guard lock(mutex_);
    return failures_;
  }

  std::function<void(const std::vector<int>&)> watch_ = [](const auto&) {
  };  // set it before the first operation
  std::atomic<int> wakes_ = 0;
  std::atomic<uint64_t> changes_ = 0;
  const std::shared_ptr<OperationQueue> queue_;

 private:
  std::mutex mutex_;  // guards failures_
  std::vector<std::exception_ptr> failures_;
};

class UnorderedQueueTest : public QueueTest {
 protected:
  UnorderedQueueTest() : QueueTest(OperationQueue::Order::kUnordered) {}
};

// Checks `condition` repeatedly, and drives no operation. Returns false if `condition` does not
// become true within a minute.
inline bool eventually(const std::function<bool()>& condition) {
  const Clock::time_point limit = Clock::now() + kLong;
  while (!condition()) {
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

}  // namespace hbm::progress
