// Ctrl-C during a wait.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "base/interruption.h"
#include "expect_error.h"
#include "queue_fixture.h"

namespace hbm {
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

  // The group has failed, and the others have been told.
  void expect_broken(const char* why) {
    ASSERT_EQ(failures().size(), 1U);
    expect_error(ErrorKind::kAborted, {why}, [&] { std::rethrow_exception(failures()[0]); });
    EXPECT_TRUE(queue_->broken());
  }
};

TEST_F(QueueInterruptionTest, AClaimedOperationIsGivenUp) {
  const auto op = script("op");
  FakeOperation operation(op);
  ASSERT_TRUE(queue_->try_claim("op"));
  EXPECT_THROW(queue_->run_claimed(operation, kLong), CtrlC);
  EXPECT_TRUE(op->abandoned);
  expect_broken("op was interrupted by Ctrl-C");
}

TEST_F(QueueInterruptionTest, ASynchronousOperationBehindAnotherIsGivenUp) {
  const auto first = script("first");
  submit(first);
  EXPECT_THROW(submit(script("second"), Mode::kSync), CtrlC);
  EXPECT_TRUE(first->abandoned);
  expect_broken("interrupted by Ctrl-C");
}

TEST_F(QueueInterruptionTest, AnAsynchronousOperationGoesOn) {
  const auto op = script("op");
  const auto ticket = submit(op);
  EXPECT_THROW(wait(ticket), CtrlC);
  EXPECT_FALSE(ticket->done());
  op->ready = true;
  EXPECT_TRUE(wait(ticket));
  EXPECT_FALSE(ticket->error());
  EXPECT_TRUE(failures().empty());
}

TEST_F(QueueInterruptionTest, AnotherThreadIsNotInterrupted) {
  const auto op = script("op");
  const auto ticket = submit(op);
  std::thread waiter([&] { EXPECT_TRUE(wait(ticket)); });
  std::this_thread::sleep_for(milliseconds(600));  // it looks every 250
  EXPECT_TRUE(pressed);
  op->ready = true;
  waiter.join();
}

}  // namespace
}  // namespace hbm
