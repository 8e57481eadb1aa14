// The kernel's tables of "key: n kB": /proc/meminfo, and each NUMA node's own.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hbm::memory {

class MemInfo {
 public:
  static MemInfo of_machine() { return MemInfo("/proc/meminfo"); }
  static MemInfo of_node(int node);  // empty for a node that does not exist

  // 0 when the table has no such key.
  uint64_t bytes(const std::string& key) const;

 private:
  // Throws Error(kUnavailable) when the file is there and cannot be read.
  explicit MemInfo(const std::string& path);

  std::vector<std::pair<std::string, std::string>> entries_;
};

}  // namespace hbm::memory
