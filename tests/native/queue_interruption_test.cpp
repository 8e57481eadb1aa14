// Ctrl-C during a wait.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "base/interruption.h"
#include "expect_error.h"
#include "queue_fixture.h"

namespace hbm::progress {
namespace {

struct CtrlC : std::runtime_error {
  CtrlC() : std::runtime_error("Ctrl-C") {}
};

std::atomic<bool> pressed{false};

std::exception_ptr look() {
  return pressed.exchange(false) ? std::make_exception_ptr(CtrlC()) : nullptr;
}

class QueueInterruptionTest : public QueueTest {
 protected:
  QueueInterruptionTest() {
    set_interruption_check(&look);
    pressed = true;
  }
  ~QueueInterruptionTest() override { set_interruption_check(nullptr); }

  // Expects that the queue is broken. Its failure hook, which notifies other ranks, must have run
  // once.
  void expect_broken(const char* why) {
    ASSERT_EQ(failures().size(), 1U);
    expect_error(ErrorKind::kAborted, {why}, [&] { std::rethrow_exception(failures()[0]); });
    EXPECT_TRUE(queue_->broken());
  }
};

TEST_F(QueueInterruptionTest, CancelsAClaimedOperation) {
  const auto op = script("op");
  FakeOperation operation(op);
  ASSERT_TRUE(queue_->try_claim("op"));
  EXPECT_THROW(queue_->run_claimed(operation, kLong), CtrlC);
  EXPECT_TRUE(op->abandoned);
  expect_broken("op was interrupted by Ctrl-C");
}

TEST_F(QueueInterruptionTest, CancelsAQueuedSynchronousOperation) {
  const auto first = script("first");
  submit(first);
  EXPECT_THROW(submit(script("second"), Mode::kSync), CtrlC);
  EXPECT_TRUE(first->abandoned);
  expect_broken("interrupted by Ctrl-C");
}

TEST_F(QueueInterruptionTest, ContinuesAnAsynchronousOperation) {
  const auto op = script("op");
  const auto request = submit(op);
  EXPECT_THROW(wait(request), CtrlC);
  EXPECT_FALSE(request->done());
  op->ready = true;
  EXPECT_TRUE(wait(request));
  EXPECT_FALSE(request->error());
  EXPECT_TRUE(failures().empty());
}

TEST_F(QueueInterruptionTest, AnotherThreadIsNotInterrupted) {
  const auto op = script("op");
  const auto request = submit(op);
  std::thread waiter([&] { EXPECT_TRUE(wait(request)); });
  std::this_thread::sleep_for(milliseconds(600));  // a wait checks for Ctrl-C every 250 ms
  EXPECT_TRUE(pressed);
  op->ready = true;
  waiter.join();
}

}  // namespace
}  // namespace hbm::progress
