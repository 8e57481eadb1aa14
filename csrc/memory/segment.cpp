#include "memory/segment.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "memory/block.h"
#include "memory/capacity.h"
#include "memory/commit.h"
#include "memory/kinds.h"

namespace hbm::memory {
namespace {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Where memkind takes the policy's HBM from, for the thread that asks.
std::vector<int> hbm_nodes(Policy policy) {
  if (!comes_from_hbm(policy)) return {};
  const OwnedBlock page = take_block(kind_of(policy), kPage);
  if (!page) {
    throw Error(ErrorKind::kUnavailable,
                cannot_allocate(kPage, policy) +
                    ": memkind gave none (a container without the capability SYS_NICE forbids "
                    "mbind)");
  }
  return block_nodes(page.get());
}

int kernel_mode(Policy policy, size_t nodes) {
  if (policy == Policy::kBind) return MPOL_BIND;
  if (policy == Policy::kInterleave) return MPOL_INTERLEAVE;
  return nodes > 1 ? MPOL_PREFERRED_MANY : MPOL_PREFERRED;
}

// For the file, so that a page lies there whichever process touches it first.
void place_on(const std::vector<int>& nodes, Policy policy, const Memfd& memory) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  if (mbind(memory.base(), memory.size(), kernel_mode(policy, nodes.size()), mask.data(),
            NUMA_NUM_NODES, 0) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot place a segment under memory policy \"") + policy_name(policy) +
                    "\": mbind: " + std::strerror(errno) +
                    "; a container needs the capability SYS_NICE for it");
  }
}

}  // namespace

std::shared_ptr<Segment> Segment::create(Policy policy, uint64_t size_bytes) {
  return std::shared_ptr<Segment>(new Segment(policy, size_bytes));
}

Segment::Segment(Policy policy, uint64_t size_bytes)
    : policy_(policy),
      nodes_(hbm_nodes(policy)),
      memory_(std::string("hbmcomm-") + policy_name(policy), size_bytes) {
  if (!nodes_.empty()) place_on(nodes_, policy, memory_);
  const int code = memkind_create_fixed(memory_.base(), memory_.size(), &heap_);
  if (code != MEMKIND_SUCCESS) {
    throw Error(ErrorKind::kUnavailable,
                "memkind cannot make a heap in a segment: " + describe(code) +
                    "; a smaller MEMKIND_ARENA_NUM_PER_KIND may help");
  }
}

Segment::~Segment() {
  if (!fork_.in_child()) memkind_destroy_kind(heap_);
}

void* Segment::allocate(size_t bytes) {
  fork_.require_owner("allocate from its parent's segment");
  bytes = std::max<size_t>(bytes, 1);
  OwnedBlock block = take_block(heap_, bytes);
  if (!block) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy_) + ": the segment of " + std::to_string(size()) +
                    " bytes has no gap of that size, and " +
                    std::to_string(ledger_.usage().in_use_bytes) + " bytes are in use");
  }
  const uint64_t hbm = nodes_.empty() ? 0 : commit_hbm(block.get(), bytes);
  // HBM is part of the machine: its share is in this room too.
  const uint64_t room = hbm == bytes ? bytes : machine_room();
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy_) + ": the machine can give " + std::to_string(room));
  }
  Ledger::Charge charge(ledger_, {.kind = heap_, .hbm_bytes = hbm, .ddr_bytes = bytes - hbm},
                        /*bound=*/0);
  return charge.keep(std::move(block), /*spilled=*/!nodes_.empty() && hbm < bytes);
}

// How many of the bytes HBM takes: all, or under kPreferred what fits.
uint64_t Segment::commit_hbm(void* block, size_t bytes) const {
  const uint64_t fitting = commit(block, bytes, policy_, nodes_, MADV_REMOVE);
  if (fitting == bytes) return bytes;
  const std::string reason = shortage(bytes, policy_, nodes_, fitting);
  if (policy_ != Policy::kPreferred) throw Error(ErrorKind::kExhausted, reason);
  notice_spill(reason);
  return fitting;
}

void Segment::free(void* block) noexcept {
  if (block == nullptr || fork_.in_child()) return;
  const auto entry = ledger_.strike(block);
  if (!entry) return;
  // Before memkind can hand the block to someone else.
  if (entry->bytes() >= kGivenBackBytes && madvise(block, entry->bytes(), MADV_REMOVE) != 0) {
    log::error(std::string("a segment cannot give memory back to the kernel: madvise: ") +
               std::strerror(errno));
  }
  memkind_free(heap_, block);
}

SegmentStats Segment::stats() const {
  SegmentStats stats;
  if (!fork_.in_child()) static_cast<Usage&>(stats) = ledger_.usage();
  stats.size_bytes = size();
  stats.page_bytes = memory_.page_bytes();
  return stats;
}

}  // namespace hbm::memory
