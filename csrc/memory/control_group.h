// The limits of this process' control groups (cgroup versions 1 and 2): of memory, which the kernel
// enforces by killing, and of processor time, which it enforces by halting a group's processes for
// the rest of a period.
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
  std::string file;  // that has the limit; empty: there is none

  // Bytes that may still be taken: the limit, less what is in use and is not file cache, which the
  // kernel gives up when asked.
  uint64_t room = std::numeric_limits<uint64_t>::max();
};

// The tightest limit, and separately the least room, of this process' groups and of those that
// these are in, as far as they can be seen (a container may see some alone).
GroupLimit group_limit();

// The same of groups as /proc/self/cgroup has them ("0::/a/b" of version 2, "5:memory:/a/b" of
// version 1), in a hierarchy that is mounted at `top` (/sys/fs/cgroup).
GroupLimit group_limit(const std::string& groups, const std::filesystem::path& top);

// The tightest quota of processor time.
struct CoreQuota {
  // The processors that may work all the time under it, rounded down, and at least 1; the largest
  // number where there is no quota.
  int cores = std::numeric_limits<int>::max();

  uint64_t group = 0;  // the inode of the group that has it; 0: there is no quota
};

CoreQuota core_quota();

// The same of groups and a hierarchy as above.
CoreQuota core_quota(const std::string& groups, const std::filesystem::path& top);

}  // namespace hbm::memory
