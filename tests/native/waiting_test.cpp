// A wait spins, or sleeps immediately. SpinBudget takes a long time between two readings of the
// clock for a preemption. So the tests imitate a preemption by a sleep.
#include "base/waiting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace hbm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::chrono::hours kLong{1};

// Waits until spinning pays again after the losses of the previous test.
void wait_until_it_pays() {
  while (!SpinBudget().pays()) std::this_thread::sleep_for(milliseconds(1));
}

void lose_the_processor(SpinBudget& budget, milliseconds away) {
  budget.skip();
  std::this_thread::sleep_for(away);
  budget.check();
}

TEST(SpinBudget, CoversAtMostTheRequestedTime) {
  wait_until_it_pays();
  SpinBudget budget;
  std::this_thread::sleep_for(microseconds(20));
  budget.skip();
  EXPECT_TRUE(budget.covers(kLong));
  EXPECT_FALSE(budget.covers(microseconds(20)));
}

TEST(SpinBudget, IsSpentAfterLosingTheProcessor) {
  wait_until_it_pays();
  SpinBudget budget;
  lose_the_processor(budget, milliseconds(5));
  EXPECT_FALSE(budget.pays());
  EXPECT_FALSE(budget.covers(kLong));
}

TEST(SpinBudget, LaterWaitsSleepImmediatelyForAWhile) {
  wait_until_it_pays();
  bool pays = true;
  // If the thread loses its processor again before the call of pays(), this call may return true.
  // So the test retries.
  for (int attempt = 0; attempt < 10 && pays; ++attempt) {
    SpinBudget budget;
    lose_the_processor(budget, milliseconds(20));
    std::thread([&pays] { pays = SpinBudget().pays(); }).join();
  }
  EXPECT_FALSE(pays);
  wait_until_it_pays();
}

TEST(SpinBudget, WorkOfTheCallersIsNoLoss) {
  wait_until_it_pays();
  SpinBudget budget;
  std::this_thread::sleep_for(milliseconds(5));
  budget.skip();
  EXPECT_TRUE(budget.pays());
}

TEST(Spin, PollsUntilReady) {
  int polls = 0;
  EXPECT_TRUE(spin([&polls] { return ++polls == 1; }));
  EXPECT_EQ(polls, 1);
}

TEST(Spin, StopsAfterAWhile) {
  EXPECT_FALSE(spin([] { return false; }));
}

}  // namespace
}  // namespace hbm
