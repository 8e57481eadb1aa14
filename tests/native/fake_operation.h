// Operations whose progress a test decides.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "progress/operation.h"

namespace hbm::progress {

// The script of a fake operation, shared by a test and the operation. The test sets the members
// that are not atomic before it gives the operation to a queue, and reads them once the request is
// done.
struct Script {
  std::string name = "operation";
  bool self_sufficient = false;
  bool peers_may_write = false;
  std::vector<int> missing;
  std::function<void()> on_begin = [] {};
  std::function<void()> on_abandon = [] {};
  std::function<Progress()> on_poll = [this] {
    return ready.load() ? Progress::kDone : Progress::kIdle;
  };

  // By default, nothing would wake a sleeper.
  std::function<Slept(std::chrono::steady_clock::time_point, bool)> on_sleep = [](auto, bool) {
    return Slept::kNoWakeup;
  };

  std::atomic<bool> ready = false;
  std::atomic<bool> begun = false;
  std::atomic<bool> abandoned = false;
  std::atomic<bool> destroyed = false;

  std::thread::id begun_by;
  std::thread::id polled_by;  // the thread of the last poll
  int calls = 0;              // not atomic: the queue orders the calls
};

class FakeOperation final : public Operation {
 public:
  explicit FakeOperation(std::shared_ptr<Script> script) : script_(std::move(script)) {}
  ~FakeOperation() override { script_->destroyed = true; }

  void begin() override {
    const Call call(*this);
    EXPECT_FALSE(script_->begun.exchange(true)) << script_->name << " was begun twice";
    script_->begun_by = std::this_thread::get_id();
    script_->on_begin();
  }

  Progress poll() override {
    const Call call(*this);
    EXPECT_TRUE(script_->begun) << script_->name << " was polled before it was begun";
    EXPECT_FALSE(over_) << script_->name << " was polled after it had ended";
    script_->polled_by = std::this_thread::get_id();
    const Progress progress = script_->on_poll();
    over_ = progress == Progress::kDone;
    return progress;
  }

  void abandon() noexcept override {
    const Call call(*this);
    EXPECT_FALSE(script_->abandoned.exchange(true)) << script_->name << " was abandoned twice";
    script_->on_abandon();
    over_ = true;
  }

  std::string describe() const override { return script_->name; }
  std::vector<int> missing() const override { return script_->missing; }
  bool self_sufficient() const override { return script_->self_sufficient; }
  bool peers_may_write() const override { return script_->peers_may_write; }
  Slept sleep(std::chrono::steady_clock::time_point until, bool polled) override {
    return script_->on_sleep(until, polled);
  }

 private:
  // Expects that no other thread is in a call of the operation.
  class Call {
   public:
    explicit Call(FakeOperation& operation) : operation_(operation) {
      EXPECT_FALSE(operation_.inside_.exchange(true, std::memory_order_relaxed))
          << operation_.script_->name << " is driven by two threads";
      ++operation_.script_->calls;
    }
    ~Call() { operation_.inside_.store(false, std::memory_order_relaxed); }

   private:
    FakeOperation& operation_;
  };

  const std::shared_ptr<Script> script_;
  std::atomic<bool> inside_ =
      false;  // relaxed, so that it orders nothing that the queue must order
  bool over_ = false;
};

inline std::shared_ptr<Script> script(std::string name, bool self_sufficient = false) {
  auto made = std::make_shared<Script>();
  made->name = std::move(name);
  made->self_sufficient = self_sufficient;
  return made;
}

// Returns the script of an operation that is complete at the first poll().
inline std::shared_ptr<Script> ready_script(std::string name, bool self_sufficient = false) {
  auto made = script(std::move(name), self_sufficient);
  made->ready = true;
  return made;
}

}  // namespace hbm::progress
