// When a wait spins and when it sleeps at once. A processor that was away is a pause between two
// looks at the clock, so a sleep stands for one.
#include "base/waiting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace hbm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::chrono::hours kLong{1};

// Waits until spinning pays again after what the test before has lost.
void wait_until_it_pays() {
  while (!SpinBudget().pays()) std::this_thread::sleep_for(milliseconds(1));
}

void lose_the_processor(SpinBudget& budget, milliseconds away) {
  budget.skip();
  std::this_thread::sleep_for(away);
  budget.look();
}

TEST(SpinBudget, CoversNoMoreThanItIsAskedFor) {
  wait_until_it_pays();
  SpinBudget budget;
  std::this_thread::sleep_for(microseconds(20));
  budget.skip();
  EXPECT_TRUE(budget.covers(kLong));
  EXPECT_FALSE(budget.covers(microseconds(20)));
}

TEST(SpinBudget, IsSpentWhenTheProcessorWasAway) {
  wait_until_it_pays();
  SpinBudget budget;
  lose_the_processor(budget, milliseconds(5));
  EXPECT_FALSE(budget.pays());
  EXPECT_FALSE(budget.covers(kLong));
}

TEST(SpinBudget, LaterWaitsOfAnyThreadSleepAtOnceForAWhile) {
  wait_until_it_pays();
  bool pays = true;
  // A processor that is away between the loss and the question hides the answer: ask again.
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

TEST(Spin, LooksUntilItIsTrue) {
  int looks = 0;
  EXPECT_TRUE(spin([&looks] { return ++looks == 1; }));
  EXPECT_EQ(looks, 1);
}

TEST(Spin, GivesUpAfterAWhile) {
  EXPECT_FALSE(spin([] { return false; }));
}

}  // namespace
}  // namespace hbm
