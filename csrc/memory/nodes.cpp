#include "memory/nodes.h"

#include <sys/mman.h>

#include <string>

#include "base/error.h"
#include "memory/block.h"
#include "memory/capacity.h"
#include "memory/commit.h"
#include "memory/kinds.h"
#include "memory/pages.h"
#include "memory/place.h"
#include "memory/room.h"
#include "memory/topology.h"

namespace hbm::memory {
namespace {

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
    // For what it throws: memkind does not tell what the kernel told it; asked for the same, the
    // kernel tells us.
    map_block(small_page_bytes(), policy, discover().closest_hbm);
    throw PlacingError(cannot_allocate(small_page_bytes(), policy) + ": memkind gave none");
  }
  return block_nodes(page.get());
}

uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes) {
  const uint64_t hbm = commit_hbm(block, bytes, policy, nodes);
  if (hbm == bytes) return hbm;
  // HBM is part of the machine: its share is in this room too.
  const uint64_t room = shared_room();
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy) + ": the machine can give " + std::to_string(room));
  }
  return hbm;
}

}  // namespace hbm::memory
