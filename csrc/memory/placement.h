// Where memory really is, as the kernel sees it now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace hbm::memory {

// NUMA node -> bytes of [address, address + bytes) that lie on it; pages that the range covers in
// part count for that part. Only pages that have been written are anywhere: untouched pages, and
// pages that were read and never written, are left out, so the sum may be less than `bytes`. Pages
// of shared memory count when any process has written them. It is a snapshot: the kernel may move
// pages at any time.
//
// REQUIRES: the range is mapped and readable.
// Throws Error(kUnavailable) when the kernel refuses the question.
// Threads: any thread. The cost is about 0.1 us a page.
std::map<int, uint64_t> where(const void* address, size_t bytes);

}  // namespace hbm::memory
