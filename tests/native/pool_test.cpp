// The pool and its blocks.
#include "memory/pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "memory/shared_memory.h"
#include "memory/system_memory.h"
#include "memory_fixture.h"
#include "seeds.h"

namespace hbm::memory {
namespace {

PoolOptions options(uint64_t capacity, Policy policy = Policy::kDdr) {
  return {.policy = policy, .capacity = capacity};
}

bool is_filled(const PoolBlock& block, int value) {
  const auto wanted = static_cast<std::byte>(value);
  return block.base()[0] == wanted &&
         std::memcmp(block.base(), block.base() + 1, block.size() - 1) == 0;
}

void fill(const PoolBlock& block, int value) { std::memset(block.base(), value, block.size()); }

uint64_t held_bytes(int fd) {
  struct stat file{};
  EXPECT_EQ(fstat(fd, &file), 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

// Returns true if this process can read the byte at `address`.
bool is_accessible(const std::byte* address) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const bool readable = write(ends[1], address, 1) == 1;
  EXPECT_TRUE(readable || errno == EFAULT);
  for (int end : ends) close(end);
  return readable;
}

// Returns a file on disk that has no name and is filled with `value`.
Descriptor file_of(uint64_t bytes, char value) {
  std::string name = std::filesystem::temp_directory_path() / "pool_test_XXXXXX";
  Descriptor file(mkostemp(name.data(), O_CLOEXEC));
  EXPECT_TRUE(file) << std::strerror(errno);
  unlink(name.c_str());
  const std::string contents(bytes, value);
  EXPECT_EQ(write(file.get(), contents.data(), bytes), static_cast<ssize_t>(bytes));
  return file;
}

TEST(Pool, BlocksAreZerosOfWholePages) {
  const auto pool = Pool::create(options(64 * kMiB));
  for (uint64_t bytes : {uint64_t{1}, kPage, kPage + 1, 3 * kMiB + 5}) {
    const auto block = pool->allocate(bytes);
    EXPECT_EQ(block->size(), (bytes + kPage - 1) / kPage * kPage);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block->base()) % kPage, 0u);
    EXPECT_TRUE(is_filled(*block, 0));
    EXPECT_EQ(pool->stats().used, block->size());
    EXPECT_EQ(pool->stats().blocks, 1u);
    fill(*block, 7);
  }
  EXPECT_EQ(pool->stats().used, 0u);
}

TEST(Pool, ReusedMemoryIsZerosAndIsolated) {
  const auto pool = Pool::create(options(16 * kMiB));
  auto block = pool->allocate(kMiB);
  std::byte* const address = block->base();
  fill(*block, 7);
  EXPECT_TRUE(is_accessible(address));
  EXPECT_FALSE(is_accessible(address + kMiB));
  block.reset();
  EXPECT_FALSE(is_accessible(address));
  block = pool->allocate(kMiB);
  EXPECT_EQ(block->base(), address) << "the lowest fits best";
  EXPECT_TRUE(is_filled(*block, 0));
}

TEST(Pool, LargeBlocksCanHaveHugePages) {
  const auto pool = Pool::create(options(64 * kMiB));
  const auto block = pool->allocate(5 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(block->base()) % (2 * kMiB), 0u);
  fill(*block, 1);
  EXPECT_GE(largest_page_bytes(block->base(), 5 * kMiB), kPage);
}

TEST(Pool, CapacityCountsPagesAndNotRanges) {
  const auto pool = Pool::create(options(8 * kPage));
  const auto first = pool->allocate(5 * kPage);  // takes 8 pages of addresses
  EXPECT_EQ(pool->stats().largest_free, 3 * kPage);
  expect_error(ErrorKind::kExhausted, {"the pool holds", "are in use"},
               [&] { pool->allocate(4 * kPage); });
  const auto second = pool->allocate(3 * kPage);
  EXPECT_EQ(pool->stats().largest_free, 0u);
  EXPECT_THROW(pool->allocate(1), Error);
  EXPECT_EQ(pool->stats().used, 8 * kPage);
}

TEST(Pool, MergesAfterBeingFullOfSmallBlocks) {
  const auto pool = Pool::create(options(64 * kPage));
  const double fragmentation = pool->stats().fragmentation;
  std::vector<std::shared_ptr<PoolBlock>> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(pool->allocate(1));
  EXPECT_EQ(pool->stats().blocks, 64u);
  EXPECT_GT(pool->stats().fragmentation, fragmentation);
  std::shuffle(blocks.begin(), blocks.end(), test_random());
  blocks.clear();
  EXPECT_EQ(pool->stats().fragmentation, fragmentation);
  EXPECT_EQ(pool->allocate(64 * kPage)->size(), 64 * kPage);
}

TEST(Pool, InvalidPoolSizesAreErrors) {
  for (uint64_t capacity : {uint64_t{0}, kPage - 1, ~uint64_t{0}}) {
    expect_error(ErrorKind::kInvalid, {"capacity is"}, [&] { Pool::create(options(capacity)); });
  }
  for (const auto& [smallest, largest] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, kMiB}, {5000, kMiB}, {kMiB, 3 * kMiB}, {2 * kMiB, kMiB}, {64, 64}}) {
    auto sizes = options(kGiB);
    sizes.smallest_block = smallest;
    sizes.largest_block = largest;
    expect_error(ErrorKind::kInvalid, {"powers of two"}, [&] { Pool::create(sizes); });
  }
}

TEST(Pool, InvalidRequestsAreErrors) {
  auto sizes = options(kGiB);
  sizes.largest_block = kMiB;
  const auto pool = Pool::create(sizes);
  expect_error(ErrorKind::kInvalid, {"at least one byte"}, [&] { pool->allocate(0); });
  for (uint64_t bytes : {kMiB + 1, ~uint64_t{0}}) {
    expect_error(ErrorKind::kExhausted, {"largest block is 1048576"},
                 [&] { pool->allocate(bytes); });
  }
  EXPECT_EQ(pool->allocate(kMiB)->size(), kMiB);
  EXPECT_EQ(pool->stats().blocks, 0u);
}

TEST(Pool, EndsAreConfigurable) {
  auto sizes = options(kMiB);
  sizes.smallest_block = 64 * kKiB;
  const auto pool = Pool::create(sizes);
  const auto first = pool->allocate(1);
  const auto second = pool->allocate(1);
  EXPECT_EQ(second->base() - first->base(), 64 * static_cast<std::ptrdiff_t>(kKiB));
}

TEST(Pool, FixesSizeAndOwnerOfABlock) {
  const auto pool = Pool::create(options(kMiB));
  const auto block = pool->allocate(10);
  EXPECT_EQ(ftruncate(block->fd(), 0), -1);
  EXPECT_EQ(ftruncate(block->fd(), static_cast<off_t>(kMiB)), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(fcntl(block->fd(), F_GETFD) & FD_CLOEXEC, 0);
  struct stat file{};
  ASSERT_EQ(fstat(block->fd(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

TEST(Pool, DescriptorReachesOnlyItsBlock) {
  const auto pool = Pool::create(options(kMiB));
  const auto first = pool->allocate(kPage);
  const auto second = pool->allocate(kPage);
  fill(*first, 1);
  fill(*second, 2);
  const auto peer = map_segment(first->fd());
  EXPECT_EQ(peer->size(), kPage);
  EXPECT_EQ(std::memcmp(peer->base(), first->base(), kPage), 0);
  std::memset(peer->base(), 3, kPage);
  EXPECT_TRUE(is_filled(*first, 3));
  EXPECT_TRUE(is_filled(*second, 2));
}

TEST(Pool, AReadOnlyDescriptorCannotWrite) {
  const auto pool = Pool::create(options(kMiB));
  const auto block = pool->allocate(kPage);
  const Descriptor file = block->read_only();
  EXPECT_NE(fcntl(file.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0), MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ(write(file.get(), "x", 1), -1);
  EXPECT_NE(fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1), 0);
  void* const there = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(there, MAP_FAILED);
  EXPECT_EQ(mprotect(there, kPage, PROT_READ | PROT_WRITE), -1);
  fill(*block, 9);
  EXPECT_EQ(std::memcmp(there, block->base(), kPage), 0);
  munmap(there, kPage);
}

TEST(Pool, MemoryIsReleasedEvenWhileAPeerMapsIt) {
  const auto pool = Pool::create(options(4 * kMiB));
  auto block = pool->allocate(kMiB);
  const Descriptor file(dup(block->fd()));
  const auto peer = map_segment(file.get());
  fill(*block, 1);
  EXPECT_EQ(held_bytes(file.get()), kMiB);
  block.reset();
  EXPECT_EQ(held_bytes(file.get()), 0u);
  EXPECT_EQ(peer->base()[0], std::byte{0});
}

TEST(Pool, ABlockKeepsItsPool) {
  auto pool = Pool::create(options(kMiB));
  auto block = pool->allocate(kPage);
  pool.reset();
  fill(*block, 1);
  EXPECT_TRUE(is_filled(*block, 1));
}

TEST(Pool, MapsFilesAndKeepsTheirContents) {
  const auto pool = Pool::create(options(kMiB));
  Descriptor file = file_of(2 * kPage + 5, 'x');
  const Descriptor same(dup(file.get()));
  auto block = pool->map(std::move(file), 2 * kPage + 5);
  EXPECT_EQ(block->size(), 3 * kPage);
  EXPECT_EQ(pool->stats().used, 3 * kPage);
  EXPECT_EQ(block->base()[2 * kPage + 4], std::byte{'x'});
  block->base()[1] = std::byte{'y'};
  block.reset();
  EXPECT_EQ(pool->stats().used, 0u);
  char found[3];
  ASSERT_EQ(pread(same.get(), found, 3, 0), 3);
  EXPECT_EQ(std::string(found, 3), "xyx");
}

TEST(Pool, FilesThatDoNotFitAreErrors) {
  const auto pool = Pool::create(options(kMiB));
  expect_error(ErrorKind::kInvalid, {"or has 10"}, [&] { pool->map(file_of(10, 'x'), 11); });
  expect_error(ErrorKind::kInvalid, {"fstat"}, [&] { pool->map(Descriptor(), 1); });
  expect_error(ErrorKind::kInvalid, {"no regular file"},
               [&] { pool->map(Descriptor(open("/dev/zero", O_RDWR | O_CLOEXEC)), 1); });
  expect_error(ErrorKind::kInvalid, {"at least one byte"}, [&] { pool->map(file_of(1, 'x'), 0); });
  expect_error(ErrorKind::kUnavailable, {"Permission denied"},
               [&] { pool->map(Descriptor(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 1); });
  EXPECT_EQ(pool->stats().used, 0u);
  EXPECT_EQ(pool->stats().blocks, 0u);
}

TEST(Pool, OnlyTheStrictPoliciesNeedHbm) {
  without_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      expect_error(ErrorKind::kUnavailable, {"memkind finds none"},
                   [&] { Pool::create(options(kMiB, policy)); });
    }
    const auto pool = Pool::create(options(kMiB, Policy::kPreferred));
    fill(*pool->allocate(kMiB), 1);
  });
}

TEST(Pool, EveryPolicyAllocatesWithHbm) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      const auto pool = Pool::create(options(64 * kMiB, policy));
      const auto block = pool->allocate(40 * kMiB);
      const bool strict = is_strict(policy);
      EXPECT_EQ(held_bytes(block->fd()), strict ? 40 * kMiB : 0) << policy_name(policy);
      EXPECT_EQ(block_nodes(map_segment(block->fd())->base()),
                policy == Policy::kDdr ? std::vector<int>{} : std::vector<int>{0});
      fill(*block, 1);
      EXPECT_EQ(where(block->base(), block->size()), (std::map<int, uint64_t>{{0, 40 * kMiB}}));
    }
  });
}

TEST(Pool, StrictPoliciesRefuseFiles) {
  with_hbm([] {
    for (Policy policy : {Policy::kBind, Policy::kInterleave}) {
      expect_error(ErrorKind::kUnsupported, {"cannot place a file"},
                   [&] { Pool::create(options(kMiB, policy))->map(file_of(1, 'x'), 1); });
    }
    Pool::create(options(kMiB, Policy::kPreferred))->map(file_of(1, 'x'), 1);
  });
}

TEST(Pool, ThrowsBeyondAvailableMemory) {
  with_hbm([] {
    for (Policy policy : kAllPolicies) {
      auto sizes = options(4 * machine_total(), policy);
      sizes.largest_block = uint64_t{1} << 50;
      const auto pool = Pool::create(sizes);
      const bool strict = is_strict(policy);
      expect_error(ErrorKind::kExhausted, {strict ? "HBM node 0 can give" : "the machine can give"},
                   [&] { pool->allocate(strict ? too_much() : machine_total()); });
      EXPECT_EQ(pool->stats().used, 0u);
      fill(*pool->allocate(kMiB), 1);
    }
  });
}

TEST(Pool, LimitsAreNamed) {
  without_hbm([] {
    const auto pool = Pool::create(options(kGiB));
    rlimit limit{.rlim_cur = kMiB, .rlim_max = RLIM_INFINITY};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_error(ErrorKind::kExhausted, {"RLIMIT_FSIZE is 1048576"},
                 [&] { pool->allocate(2 * kMiB); });
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 32;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    std::vector<std::shared_ptr<PoolBlock>> blocks;
    expect_error(ErrorKind::kUnavailable, {"ulimit -n"}, [&] {
      while (true) blocks.push_back(pool->allocate(1));
    });
    EXPECT_EQ(pool->stats().blocks, blocks.size());
  });
}

TEST(Pool, LittleAddressSpaceIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs the address space";
#endif
  without_hbm([] {
    rlimit limit{.rlim_cur = 16 * kGiB, .rlim_max = RLIM_INFINITY};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    expect_error(ErrorKind::kExhausted, {"cannot reserve", "ulimit -v"},
                 [] { Pool::create(options(8 * kGiB)); });
  });
}

TEST(Pool, AForkedChildHasNoBlocks) {
  auto pool = Pool::create(options(32 * kMiB));
  auto block = pool->allocate(16 * kMiB);  // large: a sanitizer in the child maps only its end
  fill(*block, 1);
  in_child([&] {
    std::byte* const base = block->base();
    EXPECT_FALSE(is_accessible(base));
    expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { pool->allocate(1); });
    expect_error(ErrorKind::kUnavailable, {"a forked child cannot"}, [&] { pool->stats(); });
    void* const other = mmap(base, kPage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    ASSERT_EQ(other, base) << "nothing was there";
    block.reset();
    pool.reset();
    std::memset(other, 2, kPage);
    const auto own = Pool::create(options(kMiB));
    fill(*own->allocate(kMiB), 3);
  });
  EXPECT_TRUE(is_filled(*block, 1));
  fill(*pool->allocate(kPage), 1);
}

TEST(Pool, ThreadsShareAPool) {
  const auto pool = Pool::create(options(32 * kMiB));
  const uint64_t seed = test_seed();
  std::vector<std::thread> threads;
  for (unsigned id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(seed + id);
      std::vector<std::shared_ptr<PoolBlock>> blocks;
      for (int i = 0; i < 200; ++i) {
        const auto block = pool->allocate(random() % (size_t{1} << (random() % 21)) + 1);
        EXPECT_TRUE(is_filled(*block, 0));
        fill(*block, static_cast<int>(id));
        blocks.push_back(block);
        if (blocks.size() < 4) continue;
        std::swap(blocks[random() % blocks.size()], blocks.back());
        EXPECT_TRUE(is_filled(*blocks.back(), static_cast<int>(id)));
        blocks.pop_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->stats().used, 0u);
  EXPECT_EQ(pool->stats().blocks, 0u);
}

}  // namespace
}  // namespace hbm::memory
