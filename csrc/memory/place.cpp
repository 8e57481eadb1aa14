#include "memory/place.h"

#include <numa.h>
#include <numaif.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

namespace hbm::memory {
namespace {

int kernel_mode(Policy policy, size_t nodes) {
  if (policy == Policy::kBind) return MPOL_BIND;
  if (policy == Policy::kInterleave) return MPOL_INTERLEAVE;
  return nodes > 1 ? MPOL_PREFERRED_MANY : MPOL_PREFERRED;
}

}  // namespace

void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes) {
  if (nodes.empty()) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  if (mbind(base, bytes, kernel_mode(policy, nodes.size()), mask.data(), NUMA_NUM_NODES, 0) == 0) {
    return;
  }
  const int error = errno;
  throw PlacingError(std::string("cannot place memory under memory policy \"") +
                     policy_name(policy) + "\": mbind: " + std::strerror(error) +
                     (error == EPERM ? "; a container needs the capability SYS_NICE for it" : ""));
}

}  // namespace hbm::memory
