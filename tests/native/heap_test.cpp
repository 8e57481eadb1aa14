// Policies, and the heap of private memory.
#include "memory/heap.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "forbid.h"
#include "memory/block.h"
#include "memory/placement.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

TEST(Policy, NamesConvertInBothDirections) {
  for (Policy policy : kAllPolicies) EXPECT_EQ(parse_policy(policy_name(policy)), policy);
  expect_error(ErrorKind::kInvalid, {"preferred, bind, interleave and ddr"},
               [] { parse_policy("HBM"); });
}

TEST(Heap, EveryPolicyAllocatesWithHbm) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      Heap heap(policy);
      void* block = heap.allocate(kMiB);
      std::memset(block, 1, kMiB);
      EXPECT_EQ(bytes_anywhere(block, kMiB), kMiB) << policy_name(policy);
      const Usage stats = heap.stats();
      EXPECT_EQ(stats.in_use_bytes, kMiB);
      EXPECT_EQ(stats.hbm_bytes, policy == Policy::kDdr ? 0 : kMiB);
      EXPECT_EQ(stats.ddr_bytes, policy == Policy::kDdr ? kMiB : 0);
      heap.free(block);
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      EXPECT_EQ(heap.stats().peak_bytes, kMiB);
    }
  });
}

TEST(Heap, OnlyTheStrictPoliciesNeedHbm) {
  without_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      expect_error(ErrorKind::kUnavailable, {"memkind finds none"}, [&] { Heap heap(policy); });
    }
    for (Policy policy : {Policy::kPreferred, Policy::kDdr}) {
      Heap heap(policy);
      void* block = heap.allocate(kMiB);
      std::memset(block, 1, kMiB);
      EXPECT_EQ(heap.stats().ddr_bytes, kMiB);
      EXPECT_EQ(heap.stats().spills, 0u);
      heap.free(block);
    }
  });
}

TEST(Heap, RejectsNodesThatDoNotExist) {
  in_child([] {
    setenv("MEMKIND_HBW_NODES", "no-node", 1);
    for (Policy policy : {Policy::kPreferred, Policy::kBind}) {
      expect_error(ErrorKind::kInvalid, {"MEMKIND_HBW_NODES=no-node"}, [&] { Heap heap(policy); });
    }
    Heap heap(Policy::kDdr);
    heap.free(heap.allocate(1));
  });
}

TEST(Heap, AlignsToCacheLinesAndPages) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      Heap heap(policy);
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{65}, kPage - 1, kPage, kPage + 1, kMiB}) {
        void* block = heap.allocate(bytes);
        const size_t alignment = bytes < kPage ? 64 : kPage;
        EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % alignment, 0u) << bytes;
        std::memset(block, 1, bytes);
        heap.free(block);
      }
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    }
  });
}

TEST(Heap, NoBytesCountAsOneAndBlocksDiffer) {
  without_hbm([] {
    Heap heap(Policy::kPreferred);
    void* a = heap.allocate(0);
    void* b = heap.allocate(0);
    EXPECT_NE(a, nullptr);
    EXPECT_NE(a, b);
    EXPECT_EQ(heap.stats().in_use_bytes, 2u);
    heap.free(a);
    heap.free(b);
    heap.free(nullptr);
  });
}

TEST(Heap, ThrowsBeyondTheNodesMemory) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy);
      expect_error(ErrorKind::kExhausted, {"HBM node 0 can give"},
                   [&] { heap.allocate(too_much()); });
      expect_error(ErrorKind::kExhausted, {"cannot allocate"}, [&] { heap.allocate(~size_t{0}); });
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      heap.free(heap.allocate(kMiB));
    }
  });
}

// The heap maps blocks of these sizes itself: memkind's size classes would round them up by as much
// as a quarter.
TEST(Heap, LargeBlocksAreMappedAtExactlyTheirPages) {
  with_hbm([] {
    constexpr size_t kSlack = 2 * kMiB;  // for other mappings during the test
    for (Policy policy : kAllPolicies) {
      Heap heap(policy);
      heap.free(heap.allocate(kPage));
      const uint64_t before = mapped_bytes();
      for (size_t bytes : {33 * kMiB + 1, 81 * kMiB}) {
        void* block = heap.allocate(bytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % kPage, 0u);
        EXPECT_LE(mapped_bytes(), before + bytes + kSlack) << policy_name(policy);
        static_cast<char*>(block)[bytes - 1] = 1;
        heap.free(block);
        EXPECT_LE(mapped_bytes(), before + kSlack) << "given back";
      }
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    }
  });
}

TEST(Heap, NamesTheAddressSpaceLimit) {
  if (!kSpaceIsOurs) GTEST_SKIP() << "a sanitizer needs the address space";
  for (Policy policy : kAllPolicies) {
    with_hbm([policy] {
      Heap heap(policy);
      heap.free(heap.allocate(kPage));
      set_limit(RLIMIT_AS, mapped_bytes() + 53 * kMiB);
      heap.free(heap.allocate(50 * kMiB));
      expect_error(ErrorKind::kExhausted,
                   {"cannot allocate 67108864 bytes", "mmap: Cannot allocate memory",
                    "RLIMIT_AS is", "ulimit -v"},
                   [&] { heap.allocate(64 * kMiB); });
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    });
  }
}

TEST(Heap, AKernelThatForbidsToPlaceMemoryIsNamed) {
  if (!can_forbid(SYS_mbind)) GTEST_SKIP() << "seccomp does not work here";
  with_hbm([] {
    ASSERT_TRUE(forbid(SYS_mbind));
    for (size_t bytes : {kPage, 8 * kMiB}) {
      for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
        Heap heap(policy);
        expect_error(ErrorKind::kUnavailable,
                     {"mbind: Operation not permitted", "the capability SYS_NICE"},
                     [&] { heap.allocate(bytes); });
        EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      }
      Heap heap(Policy::kPreferred);
      heap.free(heap.allocate(bytes));
      EXPECT_EQ(heap.stats().spills, 1u);
    }
  });
}

TEST(Heap, UnreadableFiguresAreAnError) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      Heap heap(policy);
      heap.free(heap.allocate(kPage));
      set_limit(RLIMIT_NOFILE, 0);
      for (size_t bytes : {kPage, 8 * kMiB}) {
        const std::string table = policy == Policy::kDdr ? "/proc/meminfo" : "/node0/meminfo";
        expect_error(ErrorKind::kUnavailable, {table, "ulimit -n"}, [&] { heap.allocate(bytes); });
      }
      set_limit(RLIMIT_NOFILE, 64);
      EXPECT_EQ(heap.stats().spills, 0u);
    }
  });
}

TEST(Heap, NamesARefusedMappingWithoutFigures) {
  if (!kSpaceIsOurs) GTEST_SKIP() << "a sanitizer limits what may be mapped";
  in_child([] {
    set_limit(RLIMIT_NOFILE, 0);
    expect_error(ErrorKind::kExhausted,
                 {"mmap: Cannot allocate memory", "the address space may be too short"},
                 [] { map_block(size_t{1} << 60, Policy::kDdr, {}); });
  });
}

TEST(Heap, StrictPoliciesCommitPagesImmediately) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy);
      const size_t bytes = 40 * kMiB + 5;  // more than kCommitStepBytes
      void* block = heap.allocate(bytes);
      EXPECT_EQ(where(block, bytes), (std::map<int, uint64_t>{{0, bytes}}));
      heap.free(block);
    }
  });
}

TEST(Heap, AForkedChildNeitherAllocatesNorFrees) {
  with_hbm([] {
    Heap heap(Policy::kPreferred);
    char* block = static_cast<char*>(heap.allocate(kMiB));
    std::memset(block, 7, kMiB);
    in_child([&] {
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { heap.allocate(1); });
      heap.free(block);
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      EXPECT_EQ(block[kMiB - 1], 7);
      Heap own(Policy::kPreferred);
      own.free(own.allocate(kMiB));
    });
    EXPECT_EQ(heap.stats().in_use_bytes, kMiB);
    EXPECT_EQ(block[0], 7);
    heap.free(block);
  });
}

TEST(Heap, ThreadsShareAHeap) {
  with_hbm([] {
    Heap heap(Policy::kPreferred);
    std::vector<std::thread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([&heap, id] {
        for (size_t i = 1; i <= 100; ++i) {
          const size_t bytes = (i * 7919 + static_cast<size_t>(id)) % (128 * kKiB) + 1;
          char* block = static_cast<char*>(heap.allocate(bytes));
          std::memset(block, id, bytes);
          EXPECT_EQ(block[bytes - 1], id);
          heap.free(block);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    EXPECT_EQ(heap.stats().allocations, 400u);
  });
}

}  // namespace
}  // namespace hbm::memory
