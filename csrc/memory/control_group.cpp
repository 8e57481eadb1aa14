#include "memory/control_group.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <sstream>

namespace hbm::memory {
namespace {

namespace fs = std::filesystem;

// The names of the files of one version of cgroup.
struct Names {
  const char* limit;
  const char* usage;
  const char* prefix;  // of the keys in memory.stat that include child groups
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr Names kVersion2{"memory.max", "memory.current", ""};
constexpr uint64_t kNoLimit = uint64_t{1} << 62;  // from this value on, version 1 has no limit

uint64_t file_cache(const fs::path& group, const std::string& prefix) {
  std::ifstream stat(group / "memory.stat");
  uint64_t sum = 0;
  uint64_t bytes = 0;
  for (std::string key; stat >> key >> bytes;) {
    if (key == prefix + "inactive_file" || key == prefix + "active_file") sum += bytes;
  }
  return sum;
}

void tighten(GroupLimit& tightest, const fs::path& group, const Names& names) {
  uint64_t limit = 0;
  const fs::path file = group / names.limit;
  if (!(std::ifstream(file) >> limit)) return;  // absent, or "max"
  if (limit >= kNoLimit) return;
  if (limit < tightest.bytes) {
    tightest.bytes = limit;
    tightest.file = file;
  }
  uint64_t used = 0;
  std::ifstream(group / names.usage) >> used;
  used -= std::min(used, file_cache(group, names.prefix));
  tightest.room = std::min(tightest.room, limit - std::min(limit, used));
}

bool names(const std::string& controllers, const std::string& wanted) {
  std::istringstream list(controllers);
  for (std::string one; std::getline(list, one, ',');) {
    if (one == wanted) return true;
  }
  return false;
}

using Visit = std::function<void(const fs::path& group, bool version2)>;

// Visits the groups of a controller and their parent groups.
void visit_groups(const std::string& groups, const fs::path& top, const std::string& controller,
                  const Visit& visit) {
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && !names(controllers, controller)) continue;
    const fs::path root = version2 ? top : top / controller;
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    for (; !group.empty(); group = group.parent_path()) visit(root / group, version2);
    visit(root, version2);
  }
}

// Returns the groups of this process.
std::string own_groups() {
  std::ostringstream groups;
  groups << std::ifstream("/proc/self/cgroup").rdbuf();
  return groups.str();
}

constexpr const char* kMounted = "/sys/fs/cgroup";

// A group may use `each` microseconds of processor time in every `period` microseconds. Without a
// quota, the kernel's file has "max" (version 2) or -1 (version 1).
struct Quota {
  int64_t each = -1;
  int64_t period = 0;
};

Quota quota_of(const fs::path& group, bool version2) {
  Quota quota;
  if (version2) {
    std::ifstream file(group / "cpu.max");
    if (!(file >> quota.each >> quota.period)) return {};
  } else {
    std::ifstream(group / "cpu.cfs_quota_us") >> quota.each;
    std::ifstream(group / "cpu.cfs_period_us") >> quota.period;
  }
  return quota;
}

}  // namespace

GroupLimit group_limit(const std::string& groups, const fs::path& top) {
  GroupLimit tightest;
  visit_groups(groups, top, "memory", [&](const fs::path& group, bool version2) {
    tighten(tightest, group, version2 ? kVersion2 : kVersion1);
  });
  return tightest;
}

GroupLimit group_limit() { return group_limit(own_groups(), kMounted); }

CoreQuota core_quota(const std::string& groups, const fs::path& top) {
  CoreQuota tightest;
  visit_groups(groups, top, "cpu", [&](const fs::path& group, bool version2) {
    const Quota quota = quota_of(group, version2);
    if (quota.each <= 0 || quota.period <= 0) return;
    const int64_t cores = std::max<int64_t>(1, quota.each / quota.period);
    if (cores >= tightest.cores) return;
    struct stat found{};
    stat(group.c_str(), &found);
    tightest = {static_cast<int>(cores), found.st_ino};
  });
  return tightest;
}

CoreQuota core_quota() { return core_quota(own_groups(), kMounted); }

}  // namespace hbm::memory
