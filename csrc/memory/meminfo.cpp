#include "memory/meminfo.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/error.h"

namespace hbm::memory {

MemInfo MemInfo::of_node(int node) {
  return MemInfo("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
}

// A node's lines start "Node 0 ".
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

}  // namespace hbm::memory
