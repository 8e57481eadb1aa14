#include "memory/system_memory.h"

#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/error.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// Returns overcommit_room(), or the largest number if the kernel's figures cannot be read.
uint64_t known_overcommit_room() {
  try {
    return overcommit_room(MemInfo::of_machine());
  } catch (const Error&) {
    return kUnlimited;
  }
}

}  // namespace

uint64_t small_page_bytes() noexcept {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t huge_page_bytes() {
  uint64_t bytes = small_page_bytes();
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> bytes;
  return bytes;
}

uint64_t largest_page_bytes(const void* base, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(base);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    unsigned long kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2) {
      if (begin >= first + bytes) break;
      inside = begin >= first;
    } else if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %lu", &kilobytes) == 1 &&
               kilobytes > 0) {
      return huge_page_bytes();
    }
  }
  return small_page_bytes();
}

MemInfo MemInfo::of_node(int node) {
  return MemInfo("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
}

// Without /proc, a system call gives the most important figures. Then only free memory and buffers
// count as available, and the page cache does not.
MemInfo MemInfo::of_machine() {
  MemInfo found("/proc/meminfo");
  struct sysinfo info{};
  if (!found.entries_.empty() || sysinfo(&info) != 0) return found;
  const auto enter = [&](const char* name, uint64_t units) {
    found.entries_.emplace_back(name, std::to_string(units * info.mem_unit / 1024));
  };
  enter("MemTotal:", info.totalram);
  enter("MemFree:", info.freeram);
  enter("MemAvailable:", info.freeram + info.bufferram);
  enter("SwapTotal:", info.totalswap);
  return found;
}

// Also accepts the lines of a NUMA node's table, which start with "Node 0 ".
MemInfo::MemInfo(const std::string& path) {
  std::ifstream file(path);
  if (!file && errno != ENOENT) {
    throw Error(ErrorKind::kUnavailable,
                "cannot tell how much memory is free: " + path + ": " + std::strerror(errno) +
                    (errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : ""));
  }
  for (std::string word, previous; file >> word; previous = word) {
    if (!previous.empty() && previous.back() == ':') entries_.push_back({previous, word});
  }
}

uint64_t MemInfo::bytes(const std::string& key) const {
  for (const auto& [name, kilobytes] : entries_) {
    if (name == key + ":") return std::stoull(kilobytes) * 1024;
  }
  return 0;
}

uint64_t free_bytes(const MemInfo& node) {
  return node.bytes("MemFree") + (node.bytes("Active(file)") + node.bytes("Inactive(file)")) / 2;
}

uint64_t node_free_bytes(int node) { return free_bytes(MemInfo::of_node(node)); }

uint64_t nodes_total(const std::vector<int>& nodes) {
  uint64_t sum = 0;
  for (int node : nodes) sum += MemInfo::of_node(node).bytes("MemTotal");
  return sum;
}

uint64_t machine_total() { return MemInfo::of_machine().bytes("MemTotal"); }

uint64_t overcommit_room(const MemInfo& machine) {
  constexpr int kHeuristic = 0;
  constexpr int kNever = 2;
  int mode = kHeuristic;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  if (mode == kNever) {
    const uint64_t limit = machine.bytes("CommitLimit");
    const uint64_t promised = machine.bytes("Committed_AS");
    return limit > promised ? limit - promised : 0;
  }
  if (mode == kHeuristic) return machine.bytes("MemTotal") + machine.bytes("SwapTotal");
  return std::numeric_limits<uint64_t>::max();
}

uint64_t soft_limit(int resource) noexcept {
  rlimit limit{};
  const bool limited = getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? limit.rlim_cur : kUnlimited;
}

std::string limit_text(int resource, const char* name) {
  const uint64_t limit = soft_limit(resource);
  return limit == kUnlimited ? "" : "; " + std::string(name) + " is " + std::to_string(limit);
}

std::string bounds_of_mappings(uint64_t bytes) {
  std::string text = limit_text(RLIMIT_AS, "RLIMIT_AS") + limit_text(RLIMIT_DATA, "RLIMIT_DATA");
  if (!text.empty()) text += " (ulimit -v, ulimit -d)";
  const uint64_t room = known_overcommit_room();
  if (bytes > room) {
    text += "; the kernel's setting vm.overcommit_memory lets no more than " +
            std::to_string(room) + " be mapped";
  }
  if (text.empty()) {
    text =
        "; the address space may be too short, or the process has too many mappings "
        "(vm.max_map_count)";
  }
  return text;
}

}  // namespace hbm::memory
