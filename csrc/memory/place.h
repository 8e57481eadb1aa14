// Puts the pages of a mapping on NUMA nodes.
#pragma once

#include <cstddef>
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
// of a memfd, touches them first. Without nodes it does nothing. Any thread.
// REQUIRES: [base, base + bytes) is one mapping, private or of a memfd.
// Throws PlacingError when the kernel refuses.
void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes);

}  // namespace hbm::memory
