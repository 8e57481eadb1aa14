// Finds the location of memory in the kernel's tables of this process's mappings, /proc/self/maps
// and /proc/self/numa_maps. Used by processes that may not query single pages.
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
  std::map<int, uint64_t> bytes;  // by NUMA node: the bytes of this process' pages there
};

// Returns the mappings that overlap [begin, end), in order of address. Throws Error(kUnavailable)
// if the kernel has no such tables.
std::vector<Mapping> mappings_over(uintptr_t begin, uintptr_t end);

// Parses the text of the two tables. A mapping that is absent from the second table has no bytes.
std::vector<Mapping> parse_mappings(std::istream& maps, std::istream& numa_maps, uintptr_t begin,
                                    uintptr_t end);

// Returns the bytes of [begin, end) on each node. For a mapping on one node, counts
// resident_bytes() of the part in the range. A mapping on several nodes counts in full, if the
// range contains all of its pages. Throws Error(kUnavailable) if the range contains only a part of
// a mapping on several nodes, because the tables do not show the location of a part.
std::map<int, uint64_t> bytes_on_nodes(
    const std::vector<Mapping>& mappings, uintptr_t begin, uintptr_t end,
    const std::function<uint64_t(uintptr_t, uintptr_t)>& resident_bytes);

}  // namespace hbm::memory
