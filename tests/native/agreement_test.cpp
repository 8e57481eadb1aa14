// The step of group formation in which all ranks learn which facts hold on every rank.
#include "bootstrap/agreement.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "fake_store.h"
#include "seeds.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{60'000};

Participant participant(const std::shared_ptr<FakeStore>& store, int rank, int size) {
  return {store, "p/", rank, size, "group g", std::chrono::steady_clock::now() + kPatience};
}

// Runs act(rank) for each rank, on a thread of its own.
void on_threads(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(act, rank);
  for (std::thread& rank : ranks) rank.join();
}

TEST(Agreement, KeepsFactsThatHoldOnEachRank) {
  std::mt19937_64 random = test_random();
  for (int round = 0; round < 20; ++round) {
    const int size = 1 + static_cast<int>(random() % 9);
    std::vector<unsigned> facts;
    unsigned expected = (1U << kMostFacts) - 1;
    for (int rank = 0; rank < size; ++rank) {
      // On most ranks all facts hold, so that sometimes a fact holds on all ranks.
      facts.push_back(random() % 8 == 0 ? random() % (1U << kMostFacts) : (1U << kMostFacts) - 1);
      expected &= facts.back();
    }
    const auto store = std::make_shared<FakeStore>();
    on_threads(size, [&](int rank) {
      const Participant own = participant(store, rank, size);
      vouch(own, "step", facts[static_cast<size_t>(rank)]);
      EXPECT_EQ(held_by_all(own, "step"), expected);
    });
  }
}

TEST(Agreement, DistinguishesSteps) {
  const auto store = std::make_shared<FakeStore>();
  on_threads(3, [&](int rank) {
    const Participant own = participant(store, rank, 3);
    vouch(own, "one", 1);
    vouch(own, "other", rank == 1 ? 1 : 3);
    EXPECT_EQ(held_by_all(own, "other"), 1u);
    EXPECT_EQ(held_by_all(own, "one"), 1u);
  });
}

TEST(Agreement, NamesTheRanksThatDidNotCome) {
  const auto store = std::make_shared<FakeStore>();
  std::vector<Participant> all;
  for (int rank = 0; rank < 4; ++rank) {
    all.push_back(participant(store, rank, 4));
    if (rank % 2 == 0) vouch(all.back(), "step", 1);
  }
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(1500);
  for (Participant& own : all) own.deadline = deadline;
  on_threads(4, [&](int rank) {
    if (rank % 2 == 1) return;
    const Participant& own = all[static_cast<size_t>(rank)];
    expect_error(ErrorKind::kTimeout,
                 {"rank " + std::to_string(rank) + " of group g met 2 of 4", "(step: step)",
                  "missing ranks: 1, 3."},
                 [&] { held_by_all(own, "step"); });
  });
}

// Rank 2 never arrives. Rank 0's deadline passes before rank 1 has written the key that names rank
// 1. Still rank 0's error must not count rank 1 as missing.
TEST(Agreement, DoesNotNameARankThatJustArrived) {
  const auto store = std::make_shared<FakeStore>();
  std::atomic<int> vouched{0};
  on_threads(2, [&](int rank) {
    Participant own = participant(store, rank, 3);
    vouch(own, "step", 1);
    for (++vouched; vouched < 2;) std::this_thread::yield();
    own.deadline = std::chrono::steady_clock::now() + milliseconds(rank == 0 ? 20 : 2000);
    expect_error(ErrorKind::kTimeout, {"met 2 of 3", "missing ranks: 2."},
                 [&] { held_by_all(own, "step"); });
  });
}

// Reports rank 1 as dead.
class Witness final : public RankWatch {
 public:
  void met(int /*rank*/, const Member& /*member*/) override {}
  void await_sight(KeyValue::Deadline /*deadline*/) override {}
  void check(const std::vector<int>& ranks) override {
    for (const int rank : ranks) {
      if (rank == 1) throw Error(ErrorKind::kDeath, "rank 1 has died");
    }
  }
  std::string deaths() override { return {}; }
};

TEST(Gather, DoesNotAwaitARecordAfterADeath) {
  Participant own = participant(std::make_shared<FakeStore>(), 2, 3);
  own.watch = std::make_shared<Witness>();
  EXPECT_EQ(await_published(own, "step", 0, own.deadline), std::nullopt);
  EXPECT_LT(std::chrono::steady_clock::now(), own.deadline);
}

TEST(Agreement, EndsWithTheDeathOfARank) {
  const auto store = std::make_shared<FakeStore>();
  on_threads(3, [&](int rank) {
    if (rank == 1) return;
    Participant own = participant(store, rank, 3);
    own.watch = std::make_shared<Witness>();
    vouch(own, "step", 1);
    expect_error(ErrorKind::kDeath, {"rank 1 has died"}, [&] { held_by_all(own, "step"); });
  });
}

TEST(Agreement, FactsVouchedBeforeADeathCount) {
  const auto store = std::make_shared<FakeStore>();
  for (int rank = 0; rank < 3; ++rank) vouch(participant(store, rank, 3), "step", 2);
  Participant own = participant(store, 0, 3);
  own.watch = std::make_shared<Witness>();
  EXPECT_EQ(held_by_all(own, "step"), 2u);
}

TEST(Agreement, TakesOneKey) {
  const auto store = std::make_shared<FakeStore>();
  for (int rank = 0; rank < 100; ++rank) vouch(participant(store, rank, 100), "step", 1);
  EXPECT_EQ(held_by_all(participant(store, 7, 100), "step"), 1u);
  EXPECT_EQ(store->keys().size(), 1u);
}

TEST(Agreement, LastToVouchKnowsImmediately) {
  const auto store = std::make_shared<FakeStore>();
  EXPECT_EQ(vouch(participant(store, 1, 3), "step", 3), std::nullopt);
  EXPECT_EQ(vouch(participant(store, 0, 3), "step", 2), std::nullopt);
  EXPECT_EQ(vouch(participant(store, 2, 3), "step", 3), std::optional(2u));
}

}  // namespace
}  // namespace hbm::bootstrap
