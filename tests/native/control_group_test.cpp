// The limits of control groups, read from files that the tests write in place of the kernel's.
#include "memory/control_group.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "scratch.h"

namespace hbm::memory {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

class ControlGroup : public testing::Test {
 protected:
  void file(const std::string& name, const std::string& text) const {
    const fs::path path = scratch / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  GroupLimit limit(const std::string& groups) const { return group_limit(groups, scratch / ""); }

  int cores(const std::string& groups) const { return core_quota(groups, scratch / "").cores; }

  const Scratch scratch;
};

TEST_F(ControlGroup, HasNoLimit) {
  EXPECT_EQ(limit("").bytes, kUnlimited);
  file("a/memory.max", "max");
  EXPECT_EQ(limit("0::/a\n").bytes, kUnlimited);
  EXPECT_EQ(limit("0::/a\n").room, kUnlimited);
  EXPECT_EQ(limit("4:cpu:/a\n").bytes, kUnlimited);
  file("memory/a/memory.limit_in_bytes", "9223372036854771712");
  file("memory/a/memory.usage_in_bytes", "900");
  EXPECT_EQ(limit("4:memory:/a\n").bytes, kUnlimited);
  EXPECT_EQ(limit("4:memory:/a\n").room, kUnlimited);
  EXPECT_EQ(limit("4:memory:/a\n").file, "");
}

TEST_F(ControlGroup, ReadsLimitsOfVersion2) {
  file("a/memory.max", "1000");
  file("a/memory.current", "700");
  file("a/memory.stat", "anon 500\nactive_file 150\ninactive_file 50");
  file("a/b/memory.max", "max");
  const GroupLimit found = limit("0::/a/b\n");
  EXPECT_EQ(found.bytes, 1000u);
  EXPECT_EQ(found.file, scratch / "a/memory.max");
  EXPECT_EQ(found.room, 500u);
}

TEST_F(ControlGroup, ReadsLimitsOfVersion1) {
  file("memory/memory.limit_in_bytes", "9223372036854771712");
  file("memory/a/memory.limit_in_bytes", "5000");
  file("memory/a/memory.usage_in_bytes", "4900");
  file("memory/a/b/memory.limit_in_bytes", "3000");
  file("memory/a/b/memory.usage_in_bytes", "900");
  file("memory/a/b/memory.stat", "cache 1\ninactive_file 5\ntotal_inactive_file 400");
  const GroupLimit found = limit("9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n");
  EXPECT_EQ(found.bytes, 3000u);
  EXPECT_EQ(found.file, scratch / "memory/a/b/memory.limit_in_bytes");
  EXPECT_EQ(found.room, 100u) << "the group above has less left";
}

// In a container, the path of the process's control group may name a group of the host. Then the
// limit is read from the top of the directory of control groups that the container sees: the files
// there belong to the container's own group.
TEST_F(ControlGroup, ReadsLimitsInAContainer) {
  file("memory.max", "123");
  EXPECT_EQ(limit("0::/../docker/x\n").bytes, 123u);
}

TEST_F(ControlGroup, HasNoQuota) {
  constexpr int kAny = std::numeric_limits<int>::max();
  EXPECT_EQ(cores(""), kAny);
  file("a/cpu.max", "max 100000");
  EXPECT_EQ(cores("0::/a\n"), kAny);
  file("cpu/a/cpu.cfs_quota_us", "-1");
  file("cpu/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cores("3:cpu,cpuacct:/a\n"), kAny);
}

TEST_F(ControlGroup, QuotaOfVersion2IsTheTightest) {
  file("a/cpu.max", "350000 100000");
  file("a/b/cpu.max", "80000 10000");
  EXPECT_EQ(cores("0::/a/b\n"), 3);
  file("a/b/cpu.max", "20000 10000");
  EXPECT_EQ(cores("0::/a/b\n"), 2);
}

TEST_F(ControlGroup, QuotaOfVersion1) {
  file("cpu/a/cpu.cfs_quota_us", "199999");
  file("cpu/a/cpu.cfs_period_us", "100000");
  file("cpu/a/b/cpu.cfs_quota_us", "-1");
  file("cpu/a/b/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cores("9:cpuset:/\n3:cpu,cpuacct:/a/b\n0::/\n"), 1);
}

// A quota of less than one processor counts as one processor. The ranks run on a whole processor,
// and the kernel stops them for a part of the time.
TEST_F(ControlGroup, QuotaOfPartOfAProcessor) {
  file("cpu.max", "5000 100000");
  EXPECT_EQ(cores("0::/../docker/x\n"), 1);
}

}  // namespace
}  // namespace hbm::memory
