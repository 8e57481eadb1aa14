// Tells where memory lies from the kernel's tables of this process's mappings, /proc/self/maps and
// /proc/self/numa_maps, for processes that may not ask about single pages.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <istream>
#include <map>
#include <vector>

namespace hbm::memory {

struct Mapping {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::map<int, uint64_t> bytes;  // by NUMA node, of the pages that this process has there
};

// The mappings that overlap [begin, end), by their addresses.
// Throws Error(kUnavailable) when the kernel has no such tables.
std::vector<Mapping> mappings_over(uintptr_t begin, uintptr_t end);

// The same from the two tables' text. A mapping that the second one lacks has no bytes.
std::vector<Mapping> parse_mappings(std::istream& maps, std::istream& numa_maps, uintptr_t begin,
                                    uintptr_t end);

// Adds up what of [begin, end) lies on each node. A mapping on one node counts with what
// `resident_bytes` says of the range in it; one on several counts whole, if all of its pages are
// in the range. Throws Error(kUnavailable) for a part of one on several: the tables do not tell.
std::map<int, uint64_t> bytes_on_nodes(
    const std::vector<Mapping>& mappings, uintptr_t begin, uintptr_t end,
    const std::function<uint64_t(uintptr_t, uintptr_t)>& resident_bytes);

}  // namespace hbm::memory
