#include "memory/pages.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace hbm::memory {

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

}  // namespace hbm::memory
