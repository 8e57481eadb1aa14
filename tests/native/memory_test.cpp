// Placement, heaps, staging and binding.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "memory/binding.h"
#include "memory/capacity.h"
#include "memory/heap.h"
#include "memory/placement.h"
#include "memory/staging.h"
#include "memory/topology.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

TEST(Policy, NamesGoBothWays) {
  for (Policy policy : kAllPolicies) EXPECT_EQ(parse_policy(policy_name(policy)), policy);
  expect_error(ErrorKind::kInvalid, {"preferred, bind, interleave and ddr"},
               [] { parse_policy("HBM"); });
}

TEST(Heap, EveryPolicyAllocatesWithHbm) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      Heap heap(policy, 0);
      void* block = heap.allocate(kMiB);
      std::memset(block, 1, kMiB);
      EXPECT_EQ(bytes_anywhere(block, kMiB), kMiB) << policy_name(policy);
      const HeapStats stats = heap.stats();
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
      expect_error(ErrorKind::kUnavailable, {"memkind finds none"}, [&] { Heap heap(policy, 0); });
    }
    for (Policy policy : {Policy::kPreferred, Policy::kDdr}) {
      Heap heap(policy, 0);
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
      expect_error(ErrorKind::kInvalid, {"MEMKIND_HBW_NODES=no-node"},
                   [&] { Heap heap(policy, 0); });
    }
    Heap heap(Policy::kDdr, 0);
    heap.free(heap.allocate(1));
  });
}

TEST(Heap, AlignsToCacheLinesAndPages) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      Heap heap(policy, 0);
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
    Heap heap(Policy::kPreferred, 0);
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

TEST(Heap, TheBudgetBoundsStrictPoliciesAndDdr) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave, Policy::kDdr}) {
      Heap heap(policy, kMiB);
      void* block = heap.allocate(kMiB);
      expect_error(ErrorKind::kExhausted, {"the budget is 1048576 bytes"},
                   [&] { heap.allocate(1); });
      heap.free(block);
      heap.free(heap.allocate(kMiB));
      EXPECT_EQ(heap.stats().allocations, 2u);
      EXPECT_EQ(heap.stats().spills, 0u);
    }
  });
}

TEST(Heap, PreferredSpillsPastTheBudget) {
  with_hbm([] {
    Heap heap(Policy::kPreferred, kMiB);
    void* inside = heap.allocate(kMiB);
    void* past = heap.allocate(3 * kMiB);
    std::memset(past, 1, 3 * kMiB);
    HeapStats stats = heap.stats();
    EXPECT_EQ(stats.hbm_bytes, kMiB);
    EXPECT_EQ(stats.ddr_bytes, 3 * kMiB);
    EXPECT_EQ(stats.spills, 1u);
    heap.free(inside);
    heap.free(past);
    stats = heap.stats();
    EXPECT_EQ(stats.in_use_bytes, 0u);
    EXPECT_EQ(stats.peak_bytes, 4 * kMiB);
  });
}

TEST(Heap, MoreThanTheNodeHasIsAnErrorAndNoKill) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy, 0);
      expect_error(ErrorKind::kExhausted, {"HBM node 0 can give"},
                   [&] { heap.allocate(too_much()); });
      expect_error(ErrorKind::kExhausted, {"cannot allocate"}, [&] { heap.allocate(~size_t{0}); });
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      heap.free(heap.allocate(kMiB));
    }
  });
}

TEST(Heap, PreferredSpillsWhatTheNodeCannotHold) {
  with_hbm([] {
    Heap heap(Policy::kPreferred, 0);
    if (machine_room() > too_much() + 256 * kMiB) {
      void* block = heap.allocate(too_much());  // never touched
      EXPECT_EQ(heap.stats().spills, 1u);
      EXPECT_EQ(heap.stats().hbm_bytes, 0u);
      heap.free(block);
    }
    expect_error(ErrorKind::kExhausted, {"the machine can give"},
                 [&] { heap.allocate(~size_t{0}); });
    EXPECT_EQ(heap.stats().in_use_bytes, 0u);
  });
}

TEST(Heap, StrictPoliciesPutPagesInPlaceAtOnce) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy, 0);
      const size_t bytes = 40 * kMiB + 5;  // more than one slice
      void* block = heap.allocate(bytes);
      EXPECT_EQ(where(block, bytes), (std::map<int, uint64_t>{{0, bytes}}));
      heap.free(block);
    }
  });
}

TEST(Heap, AForkedChildNeitherAllocatesNorFrees) {
  with_hbm([] {
    Heap heap(Policy::kPreferred, 0);
    char* block = static_cast<char*>(heap.allocate(kMiB));
    std::memset(block, 7, kMiB);
    in_child([&] {
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { heap.allocate(1); });
      heap.free(block);
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
      EXPECT_EQ(block[kMiB - 1], 7);
      Heap own(Policy::kPreferred, 0);
      own.free(own.allocate(kMiB));
    });
    EXPECT_EQ(heap.stats().in_use_bytes, kMiB);
    EXPECT_EQ(block[0], 7);
    heap.free(block);
  });
}

TEST(Heap, ThreadsShareAHeap) {
  with_hbm([] {
    Heap heap(Policy::kPreferred, 8 * kMiB);
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

TEST(Where, CountsTouchedBytesAlone) {
  constexpr size_t kPages = 3000;  // more than a batch
  char* pages = static_cast<char*>(
      mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(madvise(pages, kPages * kPage, MADV_NOHUGEPAGE), 0);
  EXPECT_EQ(bytes_anywhere(pages, kPages * kPage), 0u);
  EXPECT_TRUE(where(pages, 0).empty());

  pages[0] = pages[2 * kPage] = pages[2500 * kPage] = 1;
  EXPECT_EQ(bytes_anywhere(pages, kPages * kPage), 3 * kPage);
  EXPECT_EQ(bytes_anywhere(pages + 10, kPage), kPage - 10) << "starts inside a touched page";
  EXPECT_EQ(bytes_anywhere(pages + kPage, kPage + 20), 20u) << "ends inside a touched page";
  EXPECT_EQ(bytes_anywhere(pages + 5, 7), 7u) << "lies within one page";
  munmap(pages, kPages * kPage);
}

TEST(Where, CountsSharedPagesThatAnotherProcessFilled) {
  char* pages = static_cast<char*>(
      mmap(nullptr, 8 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  in_child([&] { pages[0] = pages[5 * kPage] = 1; });
  EXPECT_EQ(bytes_anywhere(pages, 8 * kPage), 2 * kPage);
  EXPECT_EQ(bytes_anywhere(pages, 8 * kPage), 2 * kPage) << "asking brings no page into being";
  munmap(pages, 8 * kPage);
}

std::shared_ptr<StagingPool> make_pool(Policy policy, uint64_t budget) {
  return StagingPool::make(std::make_shared<Heap>(policy, 0), budget);
}

TEST(Staging, ReusesBlocksWithoutTheHeap) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto heap = std::make_shared<Heap>(policy, 0);
      const auto pool = StagingPool::make(heap, 64 * kMiB);
      for (int round = 0; round < 100; ++round) {
        for (size_t bytes = 1; bytes <= kMiB; bytes *= 2) {
          Buffer buffer = pool->acquire(bytes);
          EXPECT_EQ(buffer.size(), bytes);
          const size_t alignment = bytes < kPage ? 64 : kPage;
          EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
          std::memset(buffer.data(), round, bytes);
        }
      }
      EXPECT_EQ(heap->stats().allocations, 15u) << "one block a size class";
      EXPECT_EQ(pool->stats().kept_bytes, pool->stats().reserved_bytes);
      pool->trim();
      EXPECT_EQ(pool->stats().reserved_bytes, 0u);
      EXPECT_EQ(heap->stats().in_use_bytes, 0u);
    }
  });
}

TEST(Staging, PastTheBudgetByPolicy) {
  with_hbm([] {
    for (Policy policy : {Policy::kPreferred, Policy::kDdr}) {
      const auto pool = make_pool(policy, kMiB);
      Buffer inside = pool->acquire(kMiB);
      {
        Buffer past = pool->acquire(100);
        std::memset(past.data(), 1, 100);
        EXPECT_EQ(pool->stats().overflow_bytes, 100u);
      }
      EXPECT_EQ(pool->stats().overflow_bytes, 0u);
      EXPECT_EQ(pool->stats().overflows, 1u);
      EXPECT_EQ(pool->stats().reserved_bytes, kMiB);
    }
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      const auto pool = make_pool(policy, kMiB);
      Buffer inside = pool->acquire(kMiB);
      expect_error(ErrorKind::kExhausted, {"HBMCOMM_STAGING_BYTES"}, [&] { pool->acquire(100); });
      inside = Buffer();
      EXPECT_TRUE(pool->acquire(100));
    }
  });
}

TEST(Staging, KeptBlocksMakeRoomForOtherSizes) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kBind, kMiB);
    pool->acquire(kMiB);
    Buffer small = pool->acquire(64);
    EXPECT_EQ(pool->stats().reserved_bytes, 64u);
    pool->acquire(kMiB / 2);
    EXPECT_EQ(pool->stats().kept_bytes, kMiB / 2);
  });
}

TEST(Staging, LargeBlocksGoBackToTheHeap) {
  without_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, 64 * kMiB);
    const size_t bytes = StagingPool::kLargestClass + kMiB;
    Buffer large = pool->acquire(bytes);
    EXPECT_EQ(pool->stats().reserved_bytes, bytes);
    large = Buffer();
    EXPECT_EQ(pool->stats().reserved_bytes, 0u);
    EXPECT_EQ(pool->stats().overflows, 0u);
  });
}

TEST(Staging, BuffersOutliveTheirPoolsOwner) {
  with_hbm([] {
    auto pool = make_pool(Policy::kBind, kMiB);
    const std::weak_ptr<StagingPool> alive = pool;
    Buffer first = pool->acquire(64);
    Buffer second = std::move(first);
    EXPECT_FALSE(first);
    pool.reset();
    std::memset(second.data(), 1, 64);
    EXPECT_FALSE(alive.expired());
    second = Buffer();
    EXPECT_TRUE(alive.expired());
  });
}

TEST(Staging, AForkedChildNeitherTakesNorReturns) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, kMiB);
    Buffer held = pool->acquire(kKiB);
    std::memset(held.data(), 7, kKiB);
    in_child([&] {
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { pool->acquire(1); });
      held = Buffer();
      pool->trim();
      EXPECT_EQ(pool->stats().reserved_bytes, 0u);
    });
    EXPECT_EQ(static_cast<char*>(held.data())[kKiB - 1], 7);
    EXPECT_EQ(pool->stats().reserved_bytes, kKiB);
    EXPECT_EQ(pool->stats().kept_bytes, 0u);
  });
}

TEST(Staging, ThreadsShareAPool) {
  with_hbm([] {
    const auto pool = make_pool(Policy::kPreferred, kMiB / 2);  // short: it trims and overflows
    std::vector<std::thread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([&pool, id] {
        std::vector<Buffer> held;
        for (size_t i = 1; i <= 2000; ++i) {
          const size_t bytes = i * 7919 % (64 * kKiB) + 1;
          Buffer buffer = pool->acquire(bytes);
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
    EXPECT_EQ(stats.kept_bytes, stats.reserved_bytes);
    EXPECT_EQ(stats.overflow_bytes, 0u);
  });
}

TEST(Topology, ReportsNodesAndHowHbmWasFound) {
  with_hbm([] {
    const Topology found = discover();
    EXPECT_TRUE(found.hbm_available);
    EXPECT_NE(found.hbm_source.find("MEMKIND_HBW_NODES=0"), std::string::npos);
    EXPECT_TRUE(found.nodes.at(0).is_hbm);
    EXPECT_TRUE(found.nodes.at(0).has_cpus);
    EXPECT_GT(found.nodes.at(0).free_bytes, 0u);
    EXPECT_EQ(found.closest_hbm, std::vector<int>{0});
    EXPECT_GE(found.cpu_node, 0);
  });
  without_hbm([] {
    const Topology found = discover();
    EXPECT_TRUE(found.closest_hbm.empty());
    EXPECT_NE(found.hbm_source.find("memkind"), std::string::npos);
    for (const NodeInfo& node : found.nodes) EXPECT_FALSE(node.is_hbm);
  });
}

// A machine of two CPUs in flat SNC-2 mode, as hwloc reads it from a file in place of the real one:
// the even nodes have cores and DDR, and each odd one is the fast memory beside them.
void write_snc2_machine(const char* path) {
  hwloc_topology_t raw = nullptr;
  ASSERT_EQ(hwloc_topology_init(&raw), 0);
  const HwlocTopology topology(raw);
  ASSERT_EQ(
      hwloc_topology_set_synthetic(raw, "Package:1 Group:2 [NUMANode] [NUMANode] Core:1 PU:1"), 0);
  ASSERT_EQ(hwloc_topology_load(raw), 0);
  for (hwloc_obj_t node = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, nullptr);
       node != nullptr; node = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, node)) {
    hwloc_location cores;
    cores.type = HWLOC_LOCATION_TYPE_CPUSET;
    cores.location.cpuset = node->cpuset;
    const hwloc_uint64_t megabytes = node->os_index % 2 == 0 ? 50'000 : 250'000;
    ASSERT_EQ(hwloc_memattr_set_value(raw, HWLOC_MEMATTR_ID_BANDWIDTH, node, &cores, 0, megabytes),
              0);
  }
  ASSERT_EQ(hwloc_topology_export_xml(raw, path, 0), 0);
}

TEST(Topology, FindsHbmByBandwidth) {
  if (sysconf(_SC_NPROCESSORS_CONF) < 2) GTEST_SKIP() << "memkind wants the CPUs to exist";
  in_child([] {
    const std::string path = testing::TempDir() + "/snc2." + std::to_string(getpid()) + ".xml";
    write_snc2_machine(path.c_str());
    unsetenv("MEMKIND_HBW_NODES");
    setenv("HWLOC_XMLFILE", path.c_str(), 1);
    const Topology found = discover();
    unlink(path.c_str());
    EXPECT_TRUE(found.hbm_available) << found.hbm_source;
    EXPECT_NE(found.hbm_source.find("HMAT"), std::string::npos) << found.hbm_source;
    EXPECT_EQ(found.mode, MemoryMode::kFlat);
    EXPECT_EQ(found.cluster, "2 (SNC-2)");
    ASSERT_EQ(found.nodes.size(), 4u);
    for (const NodeInfo& node : found.nodes) {
      EXPECT_EQ(node.is_hbm, node.id % 2 == 1) << node.id;
      EXPECT_EQ(node.has_cpus, node.id % 2 == 0) << node.id;
    }
  });
}

TEST(Bind, GivesEachRankItsCore) {
  in_child([] {
    cpu_set_t before;
    ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
    const std::string none = bind(BindMode::kNone, 0, 1);
    EXPECT_NE(none.find("not bound"), std::string::npos) << none;

    const std::string core = bind(BindMode::kCore, 0, 1);
    EXPECT_NE(core.find("one core"), std::string::npos) << core;
    cpu_set_t after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_LE(CPU_COUNT(&after), CPU_COUNT(&before));

    bind(BindMode::kNuma, 0, 1);  // from the CPUs allowed at first, not from the one core
    cpu_set_t node;
    ASSERT_EQ(sched_getaffinity(0, sizeof(node), &node), 0);
    EXPECT_GE(CPU_COUNT(&node), CPU_COUNT(&after));
    expect_error(ErrorKind::kInvalid, {"cannot bind 100000 local ranks to"},
                 [] { bind(BindMode::kCore, 0, 100000); });
  });
}

TEST(Bind, StaysWithinTheCpusAllowed) {
  in_child([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &one);
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      const pid_t thread = std::stoi(task.path().filename());
      ASSERT_EQ(sched_setaffinity(thread, sizeof(one), &one), 0);
    }
    bind(BindMode::kNuma, 0, 1);
    cpu_set_t after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
    expect_error(ErrorKind::kInvalid, {"to 1 cores"}, [] { bind(BindMode::kCore, 1, 2); });
  });
}

// hwloc stands in a machine of four nodes with four cores each for the real one.
TEST(Bind, SpreadsRanksOverNodes) {
  in_child([] {
    setenv("HWLOC_SYNTHETIC", "Package:1 Group:4 [NUMANode] Core:4 PU:2", 1);
    EXPECT_EQ(bind(BindMode::kNuma, 2, 4), "NUMA node 2 (CPUs 16-23)");
    EXPECT_EQ(bind(BindMode::kNuma, 1, 2), "NUMA node 2 (CPUs 16-23)");
    EXPECT_EQ(bind(BindMode::kNuma, 7, 8), "NUMA node 3 (CPUs 24-31)");
    EXPECT_EQ(bind(BindMode::kCore, 1, 4), "one core (CPUs 8-9) on NUMA node 1");
    EXPECT_EQ(bind(BindMode::kCore, 15, 16), "one core (CPUs 30-31) on NUMA node 3");
    expect_error(ErrorKind::kInvalid, {"17 local ranks to 16 cores"},
                 [] { bind(BindMode::kCore, 0, 17); });
    EXPECT_EQ(discover().cluster, "4 (SNC-4)");
  });
}

TEST(Bind, RejectsBadArguments) {
  expect_error(ErrorKind::kInvalid, {"none, core and numa"}, [] { parse_bind_mode("socket"); });
  expect_error(ErrorKind::kInvalid, {"local rank 2 of 2"}, [] { bind(BindMode::kNone, 2, 2); });
  expect_error(ErrorKind::kInvalid, {"local rank -1"}, [] { bind(BindMode::kCore, -1, 2); });
}

}  // namespace
}  // namespace hbm::memory
