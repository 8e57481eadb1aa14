// The NUMA nodes of memory, as the kernel reports them: by queries of pages (move_pages), and in
// its tables of mappings (/proc/self/maps and numa_maps).
#include "memory/placement.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstring>
#include <map>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "expect_error.h"
#include "forbid.h"
#include "memory/numa_maps.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

using Nodes = std::map<int, uint64_t>;

constexpr size_t kBytes = 9 * kMiB;

// Returns kBytes of memory. This process has written the pages of the first 5 MiB. If `shared`,
// another process has written the last page.
char* partly_written(bool shared) {
  const int file = memfd_create("segment", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(file, kBytes), 0);
  void* const mapped =
      shared ? mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
             : mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  close(file);
  EXPECT_NE(mapped, MAP_FAILED);
  madvise(mapped, kBytes, MADV_NOHUGEPAGE);
  auto* const memory = static_cast<char*>(mapped);
  std::memset(memory + 100, 1, 5 * kMiB);
  const pid_t other = fork();
  if (other == 0) {
    memory[kBytes - 1] = 1;
    _exit(0);
  }
  waitpid(other, nullptr, 0);
  return memory;
}

TEST(Location, IsTheSameWithoutPageQueries) {
  if (!can_forbid(SYS_move_pages)) GTEST_SKIP() << "seccomp does not work here";
  in_child([] {
    const std::vector<std::pair<size_t, size_t>> parts = {
        {0, kBytes}, {5000, 3 * kMiB + 7}, {4 * kMiB, 3 * kMiB}, {6 * kMiB, 4096}, {1, kBytes - 1}};
    std::vector<const char*> memories = {partly_written(false), partly_written(true)};
    std::vector<Nodes> before;
    for (const char* memory : memories) {
      for (const auto& [offset, bytes] : parts) before.push_back(where(memory + offset, bytes));
    }
    EXPECT_GT(before.front().at(0), 5 * kMiB);
    ASSERT_TRUE(forbid(SYS_move_pages));
    std::vector<Nodes> after;
    for (const char* memory : memories) {
      for (const auto& [offset, bytes] : parts) after.push_back(where(memory + offset, bytes));
    }
    EXPECT_EQ(after, before);
  });
}

constexpr char kMaps[] =
    "10000-14000 rw-p 00000000 00:00 0\n"
    "20000-28000 rw-s 00000000 00:01 99 /memfd:hbmcomm (deleted)\n"
    "30000-38000 rw-p 00000000 00:00 0 [heap]\n"
    "40000-48000 r--p 00000000 00:00 0\n";
constexpr char kNumaMaps[] =
    "10000 default anon=3 dirty=3 N1=3 kernelpagesize_kB=4\n"
    "20000 bind:0-1 file=/memfd:N7=9 mapped=8 N0=5 N1=3 kernelpagesize_kB=4\n"
    "30000 interleave:0-1 huge anon=4 N0=2 N4=2 kernelpagesize_kB=8 heap\n"
    "40000 default\n";

Nodes told(uintptr_t begin, uintptr_t end) {
  std::istringstream maps(kMaps);
  std::istringstream numa_maps(kNumaMaps);
  return bytes_on_nodes(parse_mappings(maps, numa_maps, begin, end), begin, end,
                        [](uintptr_t from, uintptr_t to) { return to - from; });
}

TEST(NumaMaps, CountMappingsOnOneNodeAndWholeOnes) {
  EXPECT_EQ(told(0x10000, 0x14000), (Nodes{{1, 0x4000}}));
  EXPECT_EQ(told(0x10010, 0x10020), (Nodes{{1, 0x10}}));
  EXPECT_EQ(told(0x20000, 0x28000), (Nodes{{0, 0x5000}, {1, 0x3000}}));
  EXPECT_EQ(told(0x30000, 0x38000), (Nodes{{0, 0x4000}, {4, 0x4000}}));
  EXPECT_EQ(told(0x13000, 0x30000), (Nodes{{0, 0x5000}, {1, 0x4000}}));
  EXPECT_EQ(told(0x40000, 0x48000), (Nodes{}));
}

TEST(NumaMaps, RefuseAPartOfASpreadMapping) {
  expect_error(ErrorKind::kUnavailable, {"a part of a mapping", "NUMA nodes 0, 1"},
               [] { told(0x20000, 0x27000); });
}

}  // namespace
}  // namespace hbm::memory
