#include "memory/nodes.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "memory/block.h"
#include "memory/capacity.h"
#include "memory/commit.h"
#include "memory/kinds.h"
#include "memory/pages.h"

namespace hbm::memory {
namespace {

int kernel_mode(Policy policy, size_t nodes) {
  if (policy == Policy::kBind) return MPOL_BIND;
  if (policy == Policy::kInterleave) return MPOL_INTERLEAVE;
  return nodes > 1 ? MPOL_PREFERRED_MANY : MPOL_PREFERRED;
}

// How many of the bytes the nodes take: all, or under kPreferred what fits.
uint64_t commit_hbm(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes) {
  if (nodes.empty()) return 0;
  const uint64_t fitting = commit(block, bytes, policy, nodes, MADV_REMOVE);
  if (fitting == bytes) return bytes;
  const std::string reason = shortage(bytes, policy, nodes, fitting);
  if (policy != Policy::kPreferred) throw Error(ErrorKind::kExhausted, reason);
  notice_spill(reason);
  return fitting;
}

}  // namespace

std::vector<int> hbm_nodes(Policy policy) {
  if (!comes_from_hbm(policy)) return {};
  const OwnedBlock page = take_block(kind_of(policy), small_page_bytes());
  if (!page) {
    throw Error(ErrorKind::kUnavailable,
                cannot_allocate(small_page_bytes(), policy) +
                    ": memkind gave none (a container without the capability SYS_NICE forbids "
                    "mbind)");
  }
  return block_nodes(page.get());
}

void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes) {
  if (nodes.empty()) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  if (mbind(base, bytes, kernel_mode(policy, nodes.size()), mask.data(), NUMA_NUM_NODES, 0) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot place shared memory under memory policy \"") +
                    policy_name(policy) + "\": mbind: " + std::strerror(errno) +
                    "; a container needs the capability SYS_NICE for it");
  }
}

uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes) {
  const uint64_t hbm = commit_hbm(block, bytes, policy, nodes);
  if (hbm == bytes) return hbm;
  // HBM is part of the machine: its share is in this room too.
  const uint64_t room = machine_room();
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy) + ": the machine can give " + std::to_string(room));
  }
  return hbm;
}

}  // namespace hbm::memory
