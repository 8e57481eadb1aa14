// The limits of this process' control groups (cgroup versions 1 and 2). The kernel enforces limits
// of memory by killing processes. It enforces limits of processor time by halting a group's
// processes for the rest of a period.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace hbm::memory {

struct GroupLimit {
  uint64_t bytes = std::numeric_limits<uint64_t>::max();
  std::string file;  // the file with the limit; empty: no limit

  // The bytes that may still be allocated: the limit minus the bytes in use. File cache counts as
  // free, because the kernel reclaims it.
  uint64_t room = std::numeric_limits<uint64_t>::max();
};

// Returns the tightest limit, and separately the least room, of this process' groups and their
// parent groups. Only visible groups count: a container may not see all parent groups.
GroupLimit group_limit();

// Returns group_limit() of the groups in a text like /proc/self/cgroup ("0::/a/b" of version 2,
// "5:memory:/a/b" of version 1). The hierarchy is mounted at `top` (/sys/fs/cgroup).
GroupLimit group_limit(const std::string& groups, const std::filesystem::path& top);

// The tightest quota of processor time.
struct CoreQuota {
  // The number of processors that may work all the time under the quota, rounded down and at least
  // 1. It is the largest int if there is no quota.
  int cores = std::numeric_limits<int>::max();

  uint64_t group = 0;  // the inode of the group with the quota; 0: no quota
};

// Returns the tightest quota of this process' groups and their parent groups.
CoreQuota core_quota();

// Returns core_quota() of the groups in the text `groups`. `groups` and `top` are as in
// group_limit().
CoreQuota core_quota(const std::string& groups, const std::filesystem::path& top);

}  // namespace hbm::memory
