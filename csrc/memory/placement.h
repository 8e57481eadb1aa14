// Places the pages of a mapping on NUMA nodes, and finds the location of pages.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory/policy.h"

namespace hbm::memory {

// The kernel refuses to place memory on a policy's nodes, whether or not the nodes have memory
// left.
class PlacingError : public Error {
 public:
  explicit PlacingError(const std::string& what) : Error(ErrorKind::kUnavailable, what) {}
};

// Binds the pages to the nodes, whichever thread touches them first. In a shared mapping of a
// memfd, this holds for the threads of all processes. Does nothing without nodes. REQUIRES: [base,
// base + bytes) is one mapping, private or of a memfd. Throws PlacingError if the kernel refuses.
void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes);

// Returns the nodes that the kernel's policy names for the block's pages. Returns no nodes under
// the default policy (ordinary memory). REQUIRES: the block is in one mapping. Throws
// Error(kUnavailable) if the kernel refuses the query.
std::vector<int> block_nodes(const void* block);

// Returns, for each NUMA node, the bytes of [address, address + bytes) on it. If the range has only
// a part of a page, only the bytes of that part count. Only written pages have a location.
// Untouched pages, and pages that were only read, do not count, so the sum may be less than
// `bytes`. A page of shared memory counts if any process has written it. The result is a snapshot:
// the kernel may move pages at any time.
//
// If this process may not query pages, as in some containers, where() uses the kernel's tables of
// mappings. Then pages that were only read may count. If the tables do not show the location of a
// part of the range (memory/numa_maps.h), where() throws Error(kUnavailable).
//
// REQUIRES: the range is mapped and readable. Throws Error(kUnavailable) if the kernel refuses the
// query. Costs about 0.1 us a page.
std::map<int, uint64_t> where(const void* address, size_t bytes);

}  // namespace hbm::memory
