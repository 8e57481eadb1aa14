#include "memory/control_group.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace hbm::memory {
namespace {

namespace fs = std::filesystem;

// The names of a version's files.
struct Names {
  const char* limit;
  const char* usage;
  const char* prefix;  // of the keys of memory.stat that count the groups below too
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr Names kVersion2{"memory.max", "memory.current", ""};

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
  if (!(std::ifstream(file) >> limit)) return;  // not there, or "max"
  if (limit < tightest.bytes) {
    tightest.bytes = limit;
    tightest.file = file;
  }
  uint64_t used = 0;
  std::ifstream(group / names.usage) >> used;
  used -= std::min(used, file_cache(group, names.prefix));
  tightest.room = std::min(tightest.room, limit - std::min(limit, used));
}

bool names_memory(const std::string& controllers) {
  std::istringstream list(controllers);
  for (std::string one; std::getline(list, one, ',');) {
    if (one == "memory") return true;
  }
  return false;
}

}  // namespace

GroupLimit group_limit(const std::string& groups, const fs::path& top) {
  GroupLimit tightest;
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && !names_memory(controllers)) continue;
    const fs::path root = version2 ? top : top / "memory";
    const Names& names = version2 ? kVersion2 : kVersion1;
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    for (; !group.empty(); group = group.parent_path()) tighten(tightest, root / group, names);
    tighten(tightest, root, names);
  }
  return tightest;
}

GroupLimit group_limit() {
  std::ostringstream groups;
  groups << std::ifstream("/proc/self/cgroup").rdbuf();
  return group_limit(groups.str(), "/sys/fs/cgroup");
}

}  // namespace hbm::memory
