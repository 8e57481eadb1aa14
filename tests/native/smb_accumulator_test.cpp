// The accumulator: concurrent operations lose no update, with records in memory and in a store.
#include "box/server/accumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "box/server/storage/bound_operation.h"
#include "box/server/storage/store.h"
#include "kernels/accumulate.h"
#include "seeds.h"
#include "smb_store_fixture.h"

namespace hbm::box::server {
namespace {

constexpr storage::RecordSizes kSmall{.sessions = 16, .operations = 2, .parts = 6, .chunk = 4096};

// Runs with records in memory (false), and with records in a store (true).
class AccumulatorTest : public testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<storage::BoxSegment> segment(uint64_t key, uint64_t size) {
    return store_->create(creation(key, size));
  }
  storage::SessionRecord& session(uint64_t id) { return store_->records().open_session({0, id}); }

  const Scratch scratch_;
  const std::unique_ptr<storage::Store> store_ =
      open_store(GetParam() ? scratch_.store() : "", kSmall, false);
  Accumulator accumulator_{store_->records(), 3};
};

constexpr kernels::Formula kFormulas[] = {
    {Dtype::kFloat32, Dtype::kFloat32, Combine::kAdd, 0.5},
    {Dtype::kInt64, Dtype::kInt64, Combine::kAdd, 3},
    {Dtype::kBFloat16, Dtype::kBFloat16, Combine::kAssign, -1},
    {Dtype::kFloat32, Dtype::kBFloat16, Combine::kAdd, 0.5},
    {Dtype::kFloat32, Dtype::kFloat64, Combine::kAssign, 2},
    {Dtype::kFloat16, Dtype::kFloat32, Combine::kAdd, 0.1},
    {Dtype::kBFloat16, Dtype::kFloat32, Combine::kAssign, 1},
    {Dtype::kFloat64, Dtype::kFloat32, Combine::kAdd, -0.3},
};

// accumulate_test has every pair of types. The types here have every ratio of widths.
TEST_P(AccumulatorTest, AppliesFormulasToRanges) {
  storage::SessionRecord& session = this->session(1);
  const uint64_t size = 3 << 20;
  const auto target = segment(1, size), source = segment(2, size);
  std::mt19937_64 random = test_random();
  uint64_t number = 0;
  for (const kernels::Formula& formula : kFormulas) {
    const uint64_t width = element_size(formula.target);
    const uint64_t source_width = element_size(formula.source);
    const uint64_t most = 2'500'000 / std::max(width, source_width);
    for (uint64_t count :
         {uint64_t{0}, uint64_t{1}, uint64_t{4096 / width}, uint64_t{100'001}, most}) {
      for (storage::BoxSegment* one : {target.get(), source.get()}) {
        std::generate_n(contents<uint64_t>(*one), size / 8, std::ref(random));
      }
      const uint64_t to = width * (random() % 1000), from = source_width * (random() % 1000);
      std::vector<std::byte> expected(size);
      std::memcpy(expected.data(), target->block->base(), size);
      kernels::accumulate(expected.data() + to, source->block->base() + from, count, formula);

      accumulator_.accumulate(session, ++number, {*target, to}, {*source, from}, count * width,
                              formula);
      ASSERT_EQ(std::memcmp(expected.data(), target->block->base(), size), 0)
          << dtype_name(formula.target) << " from " << dtype_name(formula.source) << " " << count;
      ASSERT_EQ(session.applied.load(), number);
      ASSERT_NE(session.outcome(number), nullptr);
    }
  }
}

TEST_P(AccumulatorTest, DoublesASegment) {
  const uint64_t count = 300'000;
  const auto both = segment(1, count * 4);
  std::iota(contents<int32_t>(*both), contents<int32_t>(*both) + count, 0);
  accumulator_.accumulate(session(1), 1, {*both, 0}, {*both, 0}, count * 4, sum_of(Dtype::kInt32));
  for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(contents<int32_t>(*both)[i], 2 * i);
}

TEST_P(AccumulatorTest, FetchAddReturnsTheOldValue) {
  storage::SessionRecord& session = this->session(1);
  const auto cells = segment(1, 8192);
  EXPECT_EQ(accumulator_.fetch_add(session, 1, {*cells, 4096}, 5), 0);
  EXPECT_EQ(accumulator_.fetch_add(session, 2, {*cells, 4096}, -7), 5);
  EXPECT_EQ(accumulator_.fetch_add(session, 3, {*cells, 4096}, INT64_MIN), -2);
  EXPECT_EQ(accumulator_.fetch_add(session, 4, {*cells, 4096}, 0), INT64_MAX - 1);
  EXPECT_EQ(session.outcome(2)->value, 5);
  EXPECT_EQ(session.outcome(3)->value, -2);
  EXPECT_EQ(session.outcome(5), nullptr);
}

TEST_P(AccumulatorTest, ForgetsTheOldestOutcomes) {
  storage::SessionRecord& session = this->session(1);
  const auto cell = segment(1, 4096);
  for (uint64_t i = 1; i <= protocol::kSequencedInFlight + 1; ++i) {
    accumulator_.fetch_add(session, i, {*cell, 0}, 1);
  }
  EXPECT_EQ(session.outcome(0), nullptr);
  EXPECT_EQ(session.outcome(1), nullptr);
  ASSERT_NE(session.outcome(2), nullptr);
  EXPECT_EQ(session.outcome(2)->value, 1);
}

// Every client adds 1 to random ranges, and counts its own additions to each element.
TEST_P(AccumulatorTest, OverlappingOperationsLoseNothing) {
  constexpr uint64_t kCount = 400'000, kClients = 4, kOperations = 40;
  const auto target = segment(1, kCount * 8), ones = segment(2, kCount * 8);
  std::fill_n(contents<int64_t>(*ones), kCount, 1);
  std::vector<std::vector<int64_t>> added(kClients, std::vector<int64_t>(kCount));
  const uint64_t seed = test_seed();
  std::vector<std::thread> clients;
  for (uint64_t client = 0; client < kClients; ++client) {
    storage::SessionRecord& session = this->session(client + 1);
    clients.emplace_back([&, client] {
      std::mt19937_64 random(seed + client);
      for (uint64_t number = 1; number <= kOperations; ++number) {
        uint64_t first = random() % kCount, last = random() % kCount;
        if (first > last) std::swap(first, last);
        if (number % 4 == 0) {
          accumulator_.fetch_add(session, number, {*target, first * 8}, 1);
          last = first + 1;
        } else {
          accumulator_.accumulate(session, number, {*target, first * 8}, {*ones, 0},
                                  (last - first) * 8, sum_of(Dtype::kInt64));
        }
        for (uint64_t i = first; i < last; ++i) ++added[client][i];
      }
    });
  }
  for (std::thread& client : clients) client.join();
  for (uint64_t i = 0; i < kCount; ++i) {
    int64_t sum = 0;
    for (const auto& one : added) sum += one[i];
    ASSERT_EQ(contents<int64_t>(*target)[i], sum) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Accumulator, AccumulatorTest, testing::Values(false, true),
                         [](auto& info) { return info.param ? "store" : "memory"; });

TEST(ThreadPool, RunsEachPartOnce) {
  for (unsigned helpers : {0, 1, 3}) {
    ThreadPool pool(helpers);
    for (uint32_t parts : {1, 2, 7, 64}) {
      std::vector<std::atomic<int>> runs(parts);
      pool.run(parts, [&](uint32_t part) { ++runs[part]; });
      for (const auto& run : runs) EXPECT_EQ(run, 1);
    }
  }
}

TEST(ThreadPool, RethrowsAPartsException) {
  ThreadPool pool(2);
  std::atomic<int> runs{0};
  const auto part = [&](uint32_t i) {
    ++runs;
    if (i == 3) throw std::runtime_error("third");
  };
  EXPECT_THROW(pool.run(8, part), std::runtime_error);
  EXPECT_EQ(runs, 8);
}

TEST(Steps, CoverTheRangeByChunks) {
  for (uint64_t offset : {0, 1, 7, 8, 9, 16}) {
    for (uint64_t bytes : {1, 7, 8, 9, 17, 64}) {
      const storage::Steps steps{offset, bytes, 8};
      uint64_t at = offset;
      for (uint64_t step = 0; step < steps.count(); ++step) {
        const auto [first, last] = steps.bytes_of(step);
        EXPECT_EQ(first, at);
        EXPECT_EQ(first / 8, steps.chunk_of(step));
        EXPECT_EQ((last - 1) / 8, steps.chunk_of(step));
        at = last;
      }
      EXPECT_EQ(at, offset + bytes);
      uint64_t next = 0;
      for (uint64_t part = 0; part < 3; ++part) {
        EXPECT_EQ(steps.steps_of(part, 3).first, next);
        next = steps.steps_of(part, 3).last;
      }
      EXPECT_EQ(next, steps.count());
    }
  }
}

}  // namespace
}  // namespace hbm::box::server
