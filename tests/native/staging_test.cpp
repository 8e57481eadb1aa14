// Staging memory for messages.
#include "memory/staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "memory/heap.h"
#include "memory/tuning.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

std::shared_ptr<StagingPool> make_pool(Policy policy, uint64_t budget) {
  return StagingPool::make(std::make_shared<Heap>(policy), budget);
}

TEST(Staging, ReusesBlocksWithoutTheHeap) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto heap = std::make_shared<Heap>(policy);
      const auto pool = StagingPool::make(heap, 64 * kMiB);
      for (int round = 0; round < 100; ++round) {
        for (size_t bytes = 1; bytes <= kMiB; bytes *= 2) {
          StagingBuffer buffer = pool->acquire(bytes);
          EXPECT_EQ(buffer.size(), bytes);
          const size_t alignment = bytes < kPage ? 64 : kPage;
          EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
          std::memset(buffer.data(), round, bytes);
        }
      }
      EXPECT_EQ(heap->stats().allocations, 15u) << "one block a size class";
      EXPECT_EQ(pool->stats().cached_bytes, pool->stats().reserved_bytes);
      pool->trim();
      EXPECT_EQ(pool->stats().reserved_bytes, 0u);
      EXPECT_EQ(heap->stats().in_use_bytes, 0u);
    }
  });
}

TEST(Staging, TheBudgetBoundsTheHeap) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto heap = std::make_shared<Heap>(policy);
      const auto pool = StagingPool::make(heap, kMiB);
      StagingBuffer whole = pool->acquire(kMiB);
      if (is_strict(policy)) {
        expect_error(ErrorKind::kExhausted, {"1048576 of 1048576 bytes"},
                     [&] { pool->acquire(1); });
      } else {
        EXPECT_TRUE(pool->acquire(1));
      }
      EXPECT_EQ(heap->stats().in_use_bytes, kMiB);
      whole = StagingBuffer();
      whole = pool->acquire(kMiB);
      EXPECT_EQ(heap->stats().allocations, 1u);
      EXPECT_EQ(heap->stats().spills, 0u);
    }
  });
}

TEST(Staging, RequestsWithinTheBudgetAreRefusedBeyondIt) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto pool = make_pool(policy, kMiB);
      EXPECT_EQ(pool->overflows(), !is_strict(policy));
      StagingBuffer half = pool->acquire_within_budget(kMiB / 2);
      EXPECT_EQ(half.size(), kMiB / 2);
      EXPECT_FALSE(pool->acquire_within_budget(kMiB));
      half = StagingBuffer();
      EXPECT_TRUE(pool->acquire_within_budget(kMiB));
      EXPECT_EQ(pool->stats().overflows, 0u);
    }
  });
}

TEST(Staging, PreferredUsesDdrBeyondTheBudget) {
  with_hbm([] {
    const auto heap = std::make_shared<Heap>(Policy::kPreferred);
    const auto pool = StagingPool::make(heap, kMiB);
    StagingBuffer inside = pool->acquire(kMiB);
    StagingBuffer past = pool->acquire(3 * kMiB);
    std::memset(past.data(), 1, 3 * kMiB);
    EXPECT_EQ(heap->stats().hbm_bytes, kMiB);
    EXPECT_EQ(heap->stats().ddr_bytes, 0u);
    EXPECT_EQ(pool->stats().overflow_bytes, 3 * kMiB);
    inside = StagingBuffer();
    past = StagingBuffer();
    pool->trim();
    EXPECT_EQ(heap->stats().in_use_bytes, 0u);
    EXPECT_EQ(heap->stats().peak_bytes, kMiB);
  });
}

TEST(Staging, PastTheBudgetByPolicy) {
  with_hbm([] {
    for (Policy policy : {Policy::kPreferred, Policy::kDdr}) {
      const auto pool = make_pool(policy, kMiB);
      StagingBuffer inside = pool->acquire(kMiB);
      {
        StagingBuffer past = pool->acquire(100);
        std::memset(past.data(), 1, 100);
        EXPECT_EQ(pool->stats().overflow_bytes, 100u);
      }
      EXPECT_EQ(pool->stats().overflow_bytes, 0u);
      EXPECT_EQ(pool->stats().overflows, 1u);
      EXPECT_EQ(pool->stats().reserved_bytes, kMiB);
    }
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      const auto pool = make_pool(policy, kMiB);
      StagingBuffer inside = pool->acquire(kMiB);
      expect_error(ErrorKind::kExhausted, {"HBMCOMM_STAGING_BYTES"}, [&] { pool->acquire(100); });
      inside = StagingBuffer();
      EXPECT_TRUE(pool->acquire(100));
    }
  });
}

TEST(Staging, KeptBlocksMakeRoomForOtherSizes) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kBind, kMiB);
    pool->acquire(kMiB);
    StagingBuffer small = pool->acquire(64);
    EXPECT_EQ(pool->stats().reserved_bytes, 64u);
    pool->acquire(kMiB / 2);
    EXPECT_EQ(pool->stats().cached_bytes, kMiB / 2);
  });
}

TEST(Staging, LargeBlocksGoBackToTheHeap) {
  without_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, 64 * kMiB);
    const size_t bytes = kLargestStagingClassBytes + kMiB;
    StagingBuffer large = pool->acquire(bytes);
    EXPECT_EQ(pool->stats().reserved_bytes, bytes);
    large = StagingBuffer();
    EXPECT_EQ(pool->stats().reserved_bytes, 0u);
    EXPECT_EQ(pool->stats().overflows, 0u);
  });
}

// Acquires the blocks of a part, releases them under a StagingHold, and acquires smaller blocks for
// the next part. The hold keeps the released blocks for this thread: another thread finds no
// memory, and the pool reserves no more.
void expect_next_part(StagingPool& pool, const std::vector<size_t>& sizes) {
  std::vector<StagingBuffer> part;
  for (const size_t bytes : sizes) part.push_back(pool.acquire(bytes));
  const uint64_t reserved = pool.stats().reserved_bytes;
  {
    const StagingHold hold;
    part.clear();
    std::thread([&] {
      expect_error(ErrorKind::kExhausted, {"staging memory"}, [&] { pool.acquire(kMiB / 2); });
    }).join();
    for (const size_t bytes : sizes) {
      part.push_back(pool.acquire(bytes - bytes / 3));
      EXPECT_EQ(part.back().size(), bytes - bytes / 3);
      std::memset(part.back().data(), 1, part.back().size());
    }
    EXPECT_EQ(pool.stats().reserved_bytes, reserved);
  }
  part.clear();
  EXPECT_EQ(pool.stats().reserved_bytes, pool.stats().cached_bytes);
}

TEST(Staging, HoldKeepsReleasedBlocks) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kBind, kMiB);
    expect_next_part(*pool, {kMiB});
    expect_next_part(*pool, {64, kMiB / 2, 3 * kKiB, kMiB / 4});
    const auto large = make_pool(Policy::kBind, kLargestStagingClassBytes + kMiB);
    expect_next_part(*large, {kLargestStagingClassBytes + kMiB});
    expect_next_part(*large, {kLargestStagingClassBytes + kMiB / 2 + kKiB});
  });
}

TEST(Staging, HoldReturnsUnusedBlocks) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kBind, kMiB);
    const auto other = make_pool(Policy::kBind, kMiB);
    {
      const StagingHold hold;
      pool->acquire(kMiB);
      EXPECT_EQ(pool->stats().cached_bytes, 0u);
      EXPECT_TRUE(other->acquire(kMiB / 2)) << "a hold serves the pool that a block is of";
      for (int round = 0; round < 3; ++round) {
        std::vector<StagingBuffer> many;
        for (int each = 0; each < 20; ++each) many.push_back(other->acquire(64));
      }
    }
    EXPECT_EQ(pool->stats().cached_bytes, kMiB);
    EXPECT_EQ(other->stats().cached_bytes, other->stats().reserved_bytes);
    {
      const StagingHold hold;
      pool->acquire(kMiB / 2);
      EXPECT_TRUE(pool->acquire(kMiB)) << "held blocks make room for a larger block";
    }
  });
}

TEST(Staging, BuffersOutliveTheirPoolsOwner) {
  with_hbm([] {
    auto pool = make_pool(Policy::kBind, kMiB);
    const std::weak_ptr<StagingPool> alive = pool;
    StagingBuffer first = pool->acquire(64);
    StagingBuffer second = std::move(first);
    EXPECT_FALSE(first);
    pool.reset();
    std::memset(second.data(), 1, 64);
    EXPECT_FALSE(alive.expired());
    second = StagingBuffer();
    EXPECT_TRUE(alive.expired());
  });
}

TEST(Staging, AForkedChildCannotUseThePool) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, kMiB);
    StagingBuffer held = pool->acquire(kKiB);
    std::memset(held.data(), 7, kKiB);
    in_child([&] {
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { pool->acquire(1); });
      held = StagingBuffer();
      pool->trim();
      EXPECT_EQ(pool->stats().reserved_bytes, 0u);
    });
    EXPECT_EQ(static_cast<char*>(held.data())[kKiB - 1], 7);
    EXPECT_EQ(pool->stats().reserved_bytes, kKiB);
    EXPECT_EQ(pool->stats().cached_bytes, 0u);
  });
}

TEST(Staging, ThreadsShareAPool) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, kMiB / 2);  // little, so the pool overflows
    std::vector<std::thread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([&pool, id] {
        std::vector<StagingBuffer> held;
        for (size_t i = 1; i <= 2000; ++i) {
          const size_t bytes = i * 7919 % (64 * kKiB) + 1;
          StagingBuffer buffer = pool->acquire(bytes);
          std::memset(buffer.data(), id, bytes);
          EXPECT_EQ(static_cast<char*>(buffer.data())[bytes / 2], id);
          held.push_back(std::move(buffer));
          if (held.size() == 8) held.clear();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const StagingStats stats = pool->stats();
    EXPECT_LE(stats.reserved_bytes, kMiB / 2);
    EXPECT_EQ(stats.cached_bytes, stats.reserved_bytes);
    EXPECT_EQ(stats.overflow_bytes, 0u);
  });
}

}  // namespace
}  // namespace hbm::memory
