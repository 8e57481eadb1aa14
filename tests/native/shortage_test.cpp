// Heaps, segments and pools when memory is short.
//
// The tests choose the amount of memory: this program defines the functions of memory/room.h
// itself, so the linker takes none from the library (memory/room.cpp has no other functions). No
// test here depends on the machine's free memory or needs more than a few MiB of it.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "memory/heap.h"
#include "memory/placement.h"
#include "memory/pool.h"
#include "memory/room.h"
#include "memory/segment.h"
#include "memory/tuning.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kPlenty = std::numeric_limits<uint64_t>::max();

struct Machine {
  uint64_t nodes = kPlenty;  // room on the HBM nodes after the first `questions` queries
  int questions = 0;
  uint64_t nodes_before = kPlenty;  // room on the HBM nodes in the first `questions` queries
  uint64_t all = kPlenty;           // room on the machine
};
Machine machine;

uint64_t held_bytes(int fd) {
  struct stat file{};
  EXPECT_EQ(fstat(fd, &file), 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

}  // namespace

uint64_t room_on(const std::vector<int>& nodes, bool) {
  EXPECT_EQ(nodes, std::vector<int>{0});
  return machine.questions-- > 0 ? machine.nodes_before : machine.nodes;
}

uint64_t machine_room() { return machine.all; }
uint64_t shared_room(uint64_t) { return machine.all; }

namespace {

constexpr size_t kSmall = kMiB;
constexpr size_t kLarge = kMappedBlockBytes + 8 * kMiB;
static_assert(kSmall < kMappedBlockBytes);

TEST(Heap, StrictPoliciesRefuseBeyondTheNode) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy);
      for (size_t bytes : {kSmall, kLarge}) {
        machine = {.nodes = bytes - 1};
        expect_error(ErrorKind::kExhausted, {"HBM node 0 can give " + std::to_string(bytes - 1)},
                     [&] { heap.allocate(bytes); });
        EXPECT_EQ(heap.stats().in_use_bytes, 0u);
        machine = {.nodes = bytes};
        heap.free(heap.allocate(bytes));
      }
    }
  });
}

TEST(Heap, PreferredSpillsBeyondTheNode) {
  with_hbm([] {
    Heap heap(Policy::kPreferred);
    for (size_t bytes : {kSmall, kLarge}) {
      machine = {.nodes = bytes - 1, .all = bytes};
      const uint64_t before = heap.stats().spills;
      void* block = heap.allocate(bytes);
      EXPECT_EQ(heap.stats().spills, before + 1);
      EXPECT_EQ(heap.stats().hbm_bytes, 0u);
      EXPECT_EQ(heap.stats().ddr_bytes, bytes);
      heap.free(block);
    }
    EXPECT_EQ(heap.stats().peak_bytes, kLarge);
    machine = {};
    expect_error(ErrorKind::kExhausted, {"cannot allocate"}, [&] { heap.allocate(~size_t{0}); });
    EXPECT_EQ(heap.stats().in_use_bytes, 0u);
  });
}

TEST(Heap, ThrowsBeyondTheMachine) {
  with_hbm([] {
    for (Policy policy : {Policy::kPreferred, Policy::kDdr}) {
      Heap heap(policy);
      for (size_t bytes : {kSmall, kLarge, ~size_t{0}}) {
        machine = {.nodes = 0, .all = bytes - 1};
        expect_error(ErrorKind::kExhausted, {"the machine can give " + std::to_string(bytes - 1)},
                     [&] { heap.allocate(bytes); });
      }
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    }
  });
}

// As if another process took the rest of the node while this process commits pages.
TEST(Heap, ThrowsIfANodeFillsUp) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      Heap heap(policy);
      constexpr size_t kBytes = 40 * kMiB;  // three steps of kCommitStepBytes
      machine = {.nodes = 0, .questions = 3, .nodes_before = kPlenty};
      expect_error(ErrorKind::kExhausted, {"HBM node 0 can give 33554432"},
                   [&] { heap.allocate(kBytes); });
      EXPECT_EQ(heap.stats().in_use_bytes, 0u);
    }
  });
}

TEST(SharedSegment, StrictPoliciesRefuseBeyondTheNode) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      machine = {.nodes = 8 * kMiB};
      const auto segment = SharedSegment::create(policy, kGiB);
      expect_error(ErrorKind::kExhausted, {"HBM node 0 can give 8388608"},
                   [&] { segment->allocate(8 * kMiB + 1); });
      machine = {.nodes = 0, .questions = 2, .nodes_before = kPlenty};
      expect_error(ErrorKind::kExhausted, {"HBM node 0 can give 33554432"},
                   [&] { segment->allocate(40 * kMiB); });
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      EXPECT_EQ(held_bytes(segment->fd()), 0u);
    }
  });
}

TEST(SharedSegment, PreferredCountsFittingBytesAsHbm) {
  with_hbm([] {
    const auto segment = SharedSegment::create(Policy::kPreferred, kGiB);
    machine = {.nodes = 6 * kMiB, .all = 16 * kMiB};
    void* block = segment->allocate(16 * kMiB);  // never touched
    const SharedSegmentStats stats = segment->stats();
    EXPECT_EQ(stats.spills, 1u);
    EXPECT_EQ(stats.hbm_bytes, 6 * kMiB);
    EXPECT_EQ(stats.ddr_bytes, 10 * kMiB);
    EXPECT_EQ(held_bytes(segment->fd()), 0u);
    segment->free(block);
    EXPECT_EQ(segment->stats().in_use_bytes, 0u);
    expect_error(ErrorKind::kExhausted, {"the machine can give 16777216"},
                 [&] { segment->allocate(16 * kMiB + 1); });
  });
}

TEST(Pool, ThrowsBeyondTheCapacity) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto pool = Pool::create({.policy = policy, .capacity = kGiB});
      machine = {.nodes = 4 * kMiB, .all = 8 * kMiB};
      const char* const giver =
          is_strict(policy) ? "HBM node 0 can give 4194304" : "the machine can give 8388608";
      expect_error(ErrorKind::kExhausted, {giver}, [&] { pool->allocate(12 * kMiB); });
      EXPECT_EQ(pool->stats().used, 0u);
      pool->allocate(4 * kMiB);
    }
  });
}

}  // namespace
}  // namespace hbm::memory
