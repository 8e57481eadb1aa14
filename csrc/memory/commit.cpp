#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "memory/block.h"
#include "memory/placement.h"
#include "memory/room.h"
#include "memory/system_memory.h"
#include "memory/topology.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

void touch(char* begin, size_t bytes) noexcept {
  volatile char* page = begin;
  for (size_t offset = 0; offset < bytes; offset += kPage) page[offset] = 0;
}

uint64_t bytes_on(const void* block, size_t bytes, const std::vector<int>& nodes) {
  uint64_t sum = 0;
  for (const auto& [node, there] : where(block, bytes)) {
    if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) sum += there;
  }
  return sum;
}

uint64_t fitting_bytes(const void* block, size_t bytes, Policy policy,
                       const std::vector<int>& nodes) {
  const uint64_t room = room_on(nodes, policy == Policy::kInterleave);
  if (bytes <= room) return bytes;
  // A block larger than the nodes cannot be on them already, and checking its pages would take a
  // second.
  if (bytes >= nodes_total(nodes)) return room;
  return std::min<uint64_t>(bytes, room + bytes_on(block, bytes, nodes));
}

// Commits a block on HBM nodes. Returns the bytes that the nodes take: all, or under kPreferred the
// bytes that fit.
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

uint64_t commit(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes,
                int discard) {
  if (policy == Policy::kPreferred) return fitting_bytes(block, bytes, policy, nodes);
  char* const begin = static_cast<char*>(block);
  for (size_t done = 0; done < bytes;) {
    const size_t left = bytes - done;
    const uint64_t fitting = fitting_bytes(begin + done, left, policy, nodes);
    if (fitting < left) {
      if (done != 0) madvise(block, done, discard);
      return done + fitting;
    }
    const size_t step = std::min(left, kCommitStepBytes);
    touch(begin + done, step);
    done += step;
  }
  return bytes;
}

std::string shortage(size_t bytes, Policy policy, const std::vector<int>& nodes, uint64_t fitting) {
  std::string names;
  for (int node : nodes) {
    if (!names.empty()) names += ',';
    names += std::to_string(node);
  }
  return cannot_allocate(bytes, policy) + ": HBM node " + names + " can give " +
         std::to_string(fitting);
}

std::vector<int> hbm_nodes(Policy policy) {
  if (!comes_from_hbm(policy)) return {};
  const OwnedBlock page = take_block(kind_of(policy), small_page_bytes());
  if (!page) {
    // Repeats the mapping only to throw the kernel's reason, which memkind hides.
    map_block(small_page_bytes(), policy, discover().closest_hbm);
    throw PlacingError(cannot_allocate(small_page_bytes(), policy) + ": memkind gave none");
  }
  return block_nodes(page.get());
}

uint64_t take_room(void* block, size_t bytes, Policy policy, const std::vector<int>& nodes) {
  const uint64_t hbm = commit_hbm(block, bytes, policy, nodes);
  if (hbm == bytes) return hbm;
  // The machine's room includes the room on HBM nodes.
  const uint64_t room = shared_room(bytes);
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy) + ": the machine can give " + std::to_string(room));
  }
  return hbm;
}

}  // namespace hbm::memory
