// Puts the pages of a mapping on NUMA nodes.
#pragma once

#include <cstddef>
#include <vector>

#include "memory/policy.h"

namespace hbm::memory {

// So that a page lies on the nodes whoever touches it first; of a shared mapping of a memfd,
// whichever process. Nothing for no nodes. Any thread.
// REQUIRES: [base, base + bytes) is one mapping, private or of a memfd.
// Throws Error(kUnavailable) when the kernel refuses.
void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes);

}  // namespace hbm::memory
