// Segments and mappings of them.
#include "memory/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "memory/placement.h"
#include "memory/shared_memory.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"
#include "memory_fixture.h"
#include "seeds.h"

namespace hbm::memory {
namespace {

uint64_t held_bytes(const SharedSegment& segment) {
  struct stat file{};
  EXPECT_EQ(fstat(segment.fd(), &file), 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

bool is_filled(const void* block, char value, size_t bytes) {
  const char* const begin = static_cast<const char*>(block);
  return bytes == 0 || (*begin == value && std::memcmp(begin, begin + 1, bytes - 1) == 0);
}

TEST(SharedSegment, EveryPolicyAllocatesWithHbm) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, kGiB);
      void* block = segment->allocate(3 * kMiB);
      std::memset(block, 1, 3 * kMiB);
      EXPECT_EQ(bytes_anywhere(block, 3 * kMiB), 3 * kMiB);
      if (policy != Policy::kDdr) {
        EXPECT_EQ(where(block, 3 * kMiB), (std::map<int, uint64_t>{{0, 3 * kMiB}}));
      }
      const SharedSegmentStats stats = segment->stats();
      EXPECT_EQ(stats.in_use_bytes, 3 * kMiB);
      EXPECT_EQ(stats.hbm_bytes, policy == Policy::kDdr ? 0 : 3 * kMiB) << policy_name(policy);
      EXPECT_EQ(stats.ddr_bytes, policy == Policy::kDdr ? 3 * kMiB : 0) << policy_name(policy);
      EXPECT_EQ(stats.allocations, 1u);
      EXPECT_EQ(stats.spills, 0u);
      EXPECT_EQ(stats.size_bytes, kGiB);
      EXPECT_GE(stats.page_bytes, kPage);
      segment->free(block);
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      EXPECT_EQ(segment->stats().peak_bytes, 3 * kMiB);
    }
  });
}

TEST(SharedSegment, PolicyAppliesToAllMappings) {
  with_hbm([] {
    for (Policy policy : {Policy::kPreferred, Policy::kBind, Policy::kInterleave}) {
      const auto segment = SharedSegment::create(policy, kGiB);
      EXPECT_EQ(block_nodes(map_segment(segment->fd())->base()), std::vector<int>{0});
    }
    EXPECT_TRUE(block_nodes(SharedSegment::create(Policy::kDdr, kGiB)->base()).empty());
  });
}

TEST(SharedSegment, OnlyTheStrictPoliciesNeedHbm) {
  without_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      expect_error(ErrorKind::kUnavailable, {"memkind finds none"},
                   [&] { SharedSegment::create(policy, kGiB); });
    }
    const auto segment = SharedSegment::create(Policy::kPreferred, kGiB);
    segment->allocate(kMiB);
    EXPECT_EQ(segment->stats().ddr_bytes, kMiB);
    EXPECT_EQ(segment->stats().spills, 0u);
  });
}

TEST(SharedSegment, AlignsToCacheLinesAndPages) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, kGiB);
      std::vector<std::pair<void*, size_t>> blocks;
      for (size_t bytes : {size_t{0}, size_t{0}, size_t{1}, size_t{65}, kPage - 1, kPage, kPage + 1,
                           kMiB - 1, kMiB + 1}) {
        void* block = segment->allocate(bytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % (bytes < kPage ? 64 : kPage), 0u) << bytes;
        EXPECT_TRUE(segment->contains(block, std::max<size_t>(bytes, 1)));
        std::memset(block, static_cast<int>(blocks.size()), bytes);
        blocks.emplace_back(block, bytes);
      }
      for (size_t i = 0; i < blocks.size(); ++i) {
        EXPECT_TRUE(is_filled(blocks[i].first, static_cast<char>(i), blocks[i].second));
        segment->free(blocks[i].first);
      }
      EXPECT_NE(blocks[0].first, blocks[1].first);
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      segment->free(nullptr);
    }
  });
}

// With this setting memkind refuses to make a heap. The segment still gives blocks of its reserved
// arena, which is not a part of the heap.
TEST(SharedSegment, TheFrontNeedsNoHeap) {
  without_hbm([] {
    setenv("MEMKIND_ARENA_NUM_PER_KIND", "none", 1);
    const auto segment = SharedSegment::create(Policy::kDdr, kGiB);
    for (const size_t bytes : {size_t{16}, kPage, 3 * kMiB}) {
      void* const block = segment->allocate_reserved(bytes);
      EXPECT_TRUE(segment->contains(block, bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % (bytes < kPage ? 64 : kPage), 0u);
      std::memset(block, 1, bytes);
      EXPECT_EQ(segment->stats().in_use_bytes, bytes);
      segment->free(block);
    }
    EXPECT_EQ(segment->stats().in_use_bytes, 0u);
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_error(ErrorKind::kUnavailable, {"memkind cannot make a heap in a segment"},
                   [&] { segment->allocate(kPage); });
    }
  });
}

TEST(SharedSegment, UsesTheHeapWhenTheArenaIsFull) {
  without_hbm([] {
    const auto segment = SharedSegment::create(Policy::kDdr, kGiB);
    std::vector<void*> blocks;
    for (int i = 0; i < 30; ++i) {  // 120 MiB together; the reserved arena has 64
      blocks.push_back(segment->allocate_reserved(4 * kMiB));
      std::memset(blocks.back(), i, kMiB);
    }
    for (int i = 0; i < 30; ++i) {
      EXPECT_TRUE(is_filled(blocks[static_cast<size_t>(i)], static_cast<char>(i), kMiB));
      segment->free(blocks[static_cast<size_t>(i)]);
    }
    EXPECT_EQ(segment->stats().in_use_bytes, 0u);
    EXPECT_EQ(held_bytes(*segment), 0u);
    EXPECT_EQ(segment->allocate_reserved(64 * kMiB), segment->base());
  });
}

TEST(SharedSegment, KnowsItsAddresses) {
  without_hbm([] {
    const auto segment = SharedSegment::create(Policy::kDdr, kGiB + 1);
    EXPECT_EQ(segment->size(), kGiB + kPage);
    std::byte* const begin = segment->base();
    const size_t size = segment->size();
    EXPECT_TRUE(segment->contains(begin, size));
    EXPECT_TRUE(segment->contains(begin + size - 1, 1));
    EXPECT_FALSE(segment->contains(begin + size - 1, 2));
    EXPECT_FALSE(segment->contains(begin + 1, size));
    EXPECT_FALSE(segment->contains(begin + 1, ~size_t{0}));
    EXPECT_FALSE(segment->contains(begin + size, 0));
    EXPECT_FALSE(segment->contains(begin - 1, 1));
    EXPECT_FALSE(segment->contains(nullptr, 1));
    const int local = 0;
    EXPECT_FALSE(segment->contains(&local, sizeof(local)));
    EXPECT_EQ(segment->offset_of(begin + 5), 5u);
  });
}

TEST(SharedSegment, ThrowsBeyondAvailableMemory) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, 4 * machine_total());
      for (size_t bytes : {segment->size() + 1, ~size_t{0}}) {
        expect_error(ErrorKind::kExhausted, {"cannot allocate", "has no gap of that size"},
                     [&] { segment->allocate(bytes); });
      }
      const bool strict = is_strict(policy);
      expect_error(ErrorKind::kExhausted, {strict ? "HBM node 0 can give" : "the machine can give"},
                   [&] { segment->allocate(strict ? too_much() : machine_total()); });
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      EXPECT_EQ(held_bytes(*segment), 0u);
      segment->free(segment->allocate(kMiB));
    }
  });
}

TEST(SharedSegment, StrictPoliciesCommitPagesImmediately) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      const auto segment = SharedSegment::create(policy, kGiB);
      const size_t bytes = 40 * kMiB + 5;  // more than kCommitStepBytes
      void* block = segment->allocate(bytes);
      EXPECT_EQ(where(block, bytes), (std::map<int, uint64_t>{{0, bytes}}));
      segment->free(block);
    }
  });
}

TEST(SharedSegment, ReleasesThePagesOfLargeBlocks) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, kGiB);
      const size_t bytes = kReturnedBlockBytes + 5;
      std::vector<void*> blocks;
      for (int i = 0; i < 9; ++i) {
        blocks.push_back(segment->allocate(bytes));
        std::memset(blocks.back(), i, bytes);
      }
      EXPECT_GE(held_bytes(*segment), 9 * bytes);
      for (size_t i = 0; i < 9; i += 2) segment->free(blocks[i]);
      EXPECT_LE(held_bytes(*segment), 4 * (bytes + kPage));
      for (size_t i = 1; i < 9; i += 2) {
        EXPECT_TRUE(is_filled(blocks[i], static_cast<char>(i), bytes)) << "next to a freed block";
        segment->free(blocks[i]);
      }
      EXPECT_EQ(held_bytes(*segment), 0u);
    }
  });
}

TEST(SharedSegment, MemoryStaysFlatAndSpaceIsReused) {
  without_hbm([] {
    const auto segment = SharedSegment::create(Policy::kDdr, 64 * kMiB);
    std::optional<size_t> fit;
    for (int round = 0; round < 10; ++round) {
      std::vector<void*> blocks;
      try {
        while (true) {
          blocks.push_back(segment->allocate(2 * kMiB));
          std::memset(blocks.back(), round, 2 * kMiB);
        }
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::kExhausted) << error.what();
      }
      if (!fit) fit = blocks.size();
      EXPECT_GE(blocks.size(), 16u);
      EXPECT_EQ(blocks.size(), *fit) << "round " << round;
      for (void* block : blocks) segment->free(block);
      EXPECT_EQ(held_bytes(*segment), 0u);
    }
  });
}

// Blocks move between threads, and keep the bytes that a thread writes.
TEST(SharedSegment, ThreadsShareASegment) {
  struct Filled {
    void* block;
    size_t bytes;
    char value;
  };
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, 4 * kGiB);
      std::mutex mutex;
      std::vector<Filled> live;
      const auto release = [&](const Filled& filled) {
        EXPECT_TRUE(is_filled(filled.block, filled.value, filled.bytes));
        segment->free(filled.block);
      };
      const uint64_t seed = test_seed();
      std::vector<std::thread> threads;
      for (unsigned id = 0; id < 4; ++id) {
        threads.emplace_back([&, id] {
          std::mt19937_64 random(seed + id);
          for (int i = 0; i < 250; ++i) {
            const size_t bytes = random() % (size_t{1} << (random() % 23));
            const char value = static_cast<char>(random());
            Filled filled{segment->allocate(bytes), bytes, value};
            std::memset(filled.block, value, bytes);
            {
              const std::lock_guard lock(mutex);
              live.push_back(filled);
              if (live.size() < 40) continue;
              std::swap(live[random() % live.size()], live.back());
              filled = live.back();
              live.pop_back();
            }
            release(filled);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const Filled& filled : live) release(filled);
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      EXPECT_EQ(segment->stats().allocations, 1000u);
    }
  });
}

TEST(SharedSegment, ForkedChildOnlyReads) {
  with_hbm([] {
    const auto segment = SharedSegment::create(Policy::kPreferred, kGiB);
    char* block = static_cast<char*>(segment->allocate(2 * kMiB));
    std::memset(block, 7, 2 * kMiB);
    in_child([&] {
      EXPECT_TRUE(is_filled(block, 7, 2 * kMiB));
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"},
                   [&] { segment->allocate(1); });
      segment->free(block);
      EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      EXPECT_EQ(segment->stats().size_bytes, kGiB);
      block[0] = 8;
      const auto own = SharedSegment::create(Policy::kPreferred, kGiB);
      own->free(own->allocate(kMiB));
    });
    EXPECT_EQ(segment->stats().in_use_bytes, 2 * kMiB);
    EXPECT_EQ(block[0], 8) << "inherited blocks are shared";
    EXPECT_TRUE(is_filled(block + 1, 7, 2 * kMiB - 1));
    segment->free(block);
  });
}

TEST(SharedSegment, AForkedChildMayDestroyIt) {
  with_hbm([] {
    auto segment = SharedSegment::create(Policy::kPreferred, kGiB);
    void* block = segment->allocate(2 * kMiB);
    std::memset(block, 7, 2 * kMiB);
    in_child([&] { segment.reset(); });
    EXPECT_TRUE(is_filled(block, 7, 2 * kMiB));
    segment->free(segment->allocate(kMiB));
  });
}

// memkind's records are private to each process, so forks at any time leave the parent's heap
// intact. The child never waits for a lock that a thread held at the fork. glibc's malloc works in
// the child of a process with threads. Before GCC 13, AddressSanitizer's malloc does not: it waits
// for ever if another thread was in malloc at the fork.
TEST(SharedSegment, ForksWhileThreadsAllocate) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr bool kChildHasMalloc = false;
#else
  constexpr bool kChildHasMalloc = true;
#endif
  without_hbm([] {
    const auto segment = SharedSegment::create(Policy::kDdr, kGiB);
    char* const inherited = static_cast<char*>(segment->allocate(kMiB));
    std::memset(inherited, 7, kMiB);
    std::atomic<bool> stop = false;
    const uint64_t seed = test_seed();
    std::vector<std::thread> threads;
    for (int id = 1; id <= 2; ++id) {
      threads.emplace_back([&, id] {
        std::mt19937_64 random(seed + static_cast<uint64_t>(id));
        while (!stop) {
          const size_t bytes = random() % (256 * kKiB) + 1;
          void* block = segment->allocate(bytes);
          std::memset(block, id, bytes);
          EXPECT_TRUE(is_filled(block, static_cast<char>(id), bytes));
          segment->free(block);
        }
      });
    }
    for (int i = 0; i < 20; ++i) {
      in_child([&] {
        EXPECT_TRUE(is_filled(inherited, 7, kMiB));
        segment->free(inherited);
        if (!kChildHasMalloc) return;
        EXPECT_THROW(segment->allocate(1), Error);
        EXPECT_EQ(segment->stats().in_use_bytes, 0u);
      });
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(is_filled(inherited, 7, kMiB));
    segment->free(inherited);
    EXPECT_EQ(segment->stats().in_use_bytes, 0u);
  });
}

TEST(SharedSegment, NamesLimitsAndFitsTheDefaultToThem) {
  if (!kSpaceIsOurs) GTEST_SKIP() << "a sanitizer needs the address space";
  without_hbm([] {
    EXPECT_GE(SharedSegment::create(Policy::kDdr, 0)->size(), machine_total());
    set_limit(RLIMIT_AS, 16 * kGiB);
    EXPECT_EQ(SharedSegment::create(Policy::kDdr, 0)->size(), 2 * kGiB);
    expect_error(ErrorKind::kExhausted, {"RLIMIT_AS is 17179869184", "ulimit -v"},
                 [] { SharedSegment::create(Policy::kDdr, 20 * kGiB); });
    set_limit(RLIMIT_FSIZE, kGiB);
    EXPECT_EQ(SharedSegment::create(Policy::kDdr, 0)->size(), kGiB);
    expect_error(ErrorKind::kExhausted, {"RLIMIT_FSIZE is 1073741824", "ulimit -f"},
                 [] { SharedSegment::create(Policy::kDdr, 2 * kGiB); });
    set_limit(RLIMIT_FSIZE, 4 * kMiB);
    const auto small = SharedSegment::create(Policy::kDdr, 0);
    EXPECT_EQ(small->size(), 4 * kMiB);
    expect_error(ErrorKind::kExhausted, {"no gap", "RLIMIT_FSIZE (ulimit -f) is 4194304"},
                 [&] { small->allocate(4 * kMiB); });
    set_limit(RLIMIT_FSIZE, kMiB / 2);
    expect_error(ErrorKind::kExhausted, {"RLIMIT_FSIZE is 524288"},
                 [] { SharedSegment::create(Policy::kDdr, 0); });
  });
}

TEST(SharedSegment, LittleAddressSpaceMakesTheDefaultSmaller) {
  if (!kSpaceIsOurs) GTEST_SKIP() << "a sanitizer needs the address space";
  without_hbm([] {
    const auto large = SharedSegment::create(Policy::kDdr, 12 * kGiB);
    set_limit(RLIMIT_AS, 14 * kGiB);
    EXPECT_LT(SharedSegment::create(Policy::kDdr, 0)->size(), 2 * kGiB);
  });
}

TEST(SharedSegment, SizeBeyondTheFileLimitIsAnError) {
  without_hbm([] {
    expect_error(ErrorKind::kExhausted, {"cannot make a segment of 18446744073709551615 bytes"},
                 [] { SharedSegment::create(Policy::kDdr, ~uint64_t{0}); });
  });
}

TEST(SharedSegment, ItsSizeIsFixed) {
  without_hbm([] {
    const auto segment = SharedSegment::create(Policy::kDdr, kGiB);
    EXPECT_EQ(ftruncate(segment->fd(), 0), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_NE(fcntl(segment->fd(), F_GETFD) & FD_CLOEXEC, 0);
  });
}

TEST(SharedSegment, AProcessHasOneAPolicy) {
  with_hbm([] {
    EXPECT_TRUE(process_segment_stats().empty());
    const auto segment = process_segment(Policy::kPreferred);
    EXPECT_EQ(process_segment(Policy::kPreferred), segment);
    EXPECT_NE(process_segment(Policy::kDdr), segment);
    void* block = segment->allocate(kMiB);
    EXPECT_EQ(process_segment_stats().at(Policy::kPreferred).in_use_bytes, kMiB);
    EXPECT_EQ(process_segment_stats().size(), 2u);
    in_child([] {
      expect_error(ErrorKind::kUnavailable, {"a forked child cannot"},
                   [] { process_segment(Policy::kPreferred); });
      EXPECT_TRUE(process_segment_stats().empty());
    });
    segment->free(block);
  });
}

TEST(SharedMapping, ProcessesSeeEachOthersWrites) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto segment = SharedSegment::create(policy, kGiB);
      char* block = static_cast<char*>(segment->allocate(2 * kMiB));
      std::memset(block, 1, kMiB);
      const uint64_t offset = segment->offset_of(block);
      const int fd = dup(segment->fd());
      in_child([&] {
        const auto peer = map_segment(fd);
        close(fd);
        EXPECT_EQ(peer->size(), segment->size());
        std::byte* const there = peer->base() + offset;
        EXPECT_NE(static_cast<void*>(there), block);
        EXPECT_TRUE(is_filled(there, 1, kMiB));
        std::memset(there + kMiB, 2, kMiB);
      });
      close(fd);
      EXPECT_TRUE(is_filled(block + kMiB, 2, kMiB));
      EXPECT_EQ(bytes_anywhere(block, 2 * kMiB), 2 * kMiB);
      segment->free(block);
      EXPECT_EQ(held_bytes(*segment), 0u) << "also what a peer touched";
    }
  });
}

TEST(SharedMapping, OutlivesTheSegmentButNotAFork) {
  without_hbm([] {
    auto segment = SharedSegment::create(Policy::kDdr, kGiB);
    char* block = static_cast<char*>(segment->allocate(kMiB));
    std::memset(block, 3, kMiB);
    const uint64_t offset = segment->offset_of(block);
    auto peer = map_segment(segment->fd());
    segment.reset();
    EXPECT_TRUE(is_filled(peer->base() + offset, 3, kMiB));
    in_child([&] {
      std::byte* const base = peer->base();
      void* const other = mmap(base, kPage, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      ASSERT_EQ(other, base) << "nothing was there";
      peer.reset();
      std::memset(other, 1, kPage);
    });
  });
}

TEST(SharedMapping, NeedsAFileWithBytesInIt) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int empty = memfd_create("empty", MFD_CLOEXEC);
  for (int fd : {-1, ends[0], empty}) {
    expect_error(ErrorKind::kInvalid, {"cannot map descriptor"}, [fd] { map_segment(fd); });
  }
  for (int fd : {ends[0], ends[1], empty}) close(fd);
}

}  // namespace
}  // namespace hbm::memory
