// Where memory lies: puts the pages of a mapping on NUMA nodes, and tells where they are.
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

// Memory cannot be placed where a policy wants it, whether or not there is any.
class PlacingError : public Error {
 public:
  explicit PlacingError(const std::string& what) : Error(ErrorKind::kUnavailable, what) {}
};

// Tells the kernel to put the pages on the nodes, whichever thread, or process in a shared mapping
// of a memfd, touches them first. Without nodes it does nothing.
// REQUIRES: [base, base + bytes) is one mapping, private or of a memfd.
// Throws PlacingError when the kernel refuses.
void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes);

// The nodes that the kernel's policy for the block's pages names; all of the block must come from
// one mapping. Empty under the default policy (ordinary memory).
// Throws Error(kUnavailable) when the kernel refuses the question.
std::vector<int> block_nodes(const void* block);

// NUMA node -> bytes of [address, address + bytes) that lie on it; pages that the range covers in
// part count for that part. Only pages that have been written are anywhere: untouched pages, and
// pages that were read and never written, are left out, so the sum may be less than `bytes`. Pages
// of shared memory count when any process has written them. It is a snapshot: the kernel may move
// pages at any time.
//
// Where the kernel lets this process not ask about pages (containers), its tables of mappings tell;
// pages that were read and never written may count then. See memory/numa_maps.h for what they do
// not tell, which is an error too.
//
// REQUIRES: the range is mapped and readable.
// Throws Error(kUnavailable) when the kernel refuses the question. The cost is about 0.1 us a page.
std::map<int, uint64_t> where(const void* address, size_t bytes);

}  // namespace hbm::memory
