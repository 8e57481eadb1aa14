#include "memory/segment.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "memory/libraries.h"
#include "memory/placement.h"
#include "memory/room.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

struct ProcessSegments {
  const ForkGuard fork;
  std::mutex mutex;  // guards the map
  std::map<Policy, std::shared_ptr<SharedSegment>> by_policy;
};

// Never destroyed: tensors may outlive static objects.
ProcessSegments& process_segments() {
  static auto* const all = new ProcessSegments;
  return *all;
}

}  // namespace

std::shared_ptr<SharedSegment> SharedSegment::create(Policy policy, uint64_t size_bytes) {
  return std::shared_ptr<SharedSegment>(new SharedSegment(policy, size_bytes));
}

SharedSegment::SharedSegment(Policy policy, uint64_t size_bytes)
    : policy_(policy),
      nodes_(hbm_nodes(policy)),
      memory_(std::string("hbmcomm-") + policy_name(policy), size_bytes),
      arena_(memory_.base(), memory_.size()) {
  place_on(nodes_, policy, memory_.base(), memory_.size());
}

SharedSegment::~SharedSegment() {
  if (heap_ != nullptr && !fork_.in_child()) libraries().destroy_kind(heap_);
}

memkind_t SharedSegment::heap() {
  const std::lock_guard lock(heap_mutex_);
  if (heap_ != nullptr) return heap_;
  const int code = libraries().create_fixed(memory_.base() + arena_.size(),
                                            memory_.size() - arena_.size(), &heap_);
  if (code != MEMKIND_SUCCESS) {
    heap_ = nullptr;
    throw Error(ErrorKind::kUnavailable,
                "memkind cannot make a heap in a segment: " + memkind_message(code) +
                    "; a smaller MEMKIND_ARENA_NUM_PER_KIND may help");
  }
  return heap_;
}

void* SharedSegment::allocate(size_t bytes) {
  fork_.require_owner("allocate from its parent's segment");
  bytes = std::max<size_t>(bytes, 1);
  OwnedBlock block = take_block(heap(), bytes);
  if (!block) {
    throw Error(ErrorKind::kExhausted,
                cannot_allocate(bytes, policy_) + ": the segment of " + std::to_string(size()) +
                    " bytes has no gap of that size, and " +
                    std::to_string(ledger_.usage().in_use_bytes) + " bytes are in use" +
                    limit_text(RLIMIT_FSIZE, "RLIMIT_FSIZE (ulimit -f)"));
  }
  return hand_out(std::move(block), bytes);
}

void* SharedSegment::allocate_reserved(size_t bytes) {
  fork_.require_owner("allocate from its parent's segment");
  bytes = std::max<size_t>(bytes, 1);
  OwnedBlock block(arena_.allocate(bytes), {.arena = &arena_});
  return block ? hand_out(std::move(block), bytes) : allocate(bytes);
}

void* SharedSegment::hand_out(OwnedBlock block, size_t bytes) {
  const uint64_t hbm = take_room(block.get(), bytes, policy_, nodes_);
  return ledger_.enter(std::move(block), {.hbm_bytes = hbm, .ddr_bytes = bytes - hbm},
                       /*spilled=*/!nodes_.empty() && hbm < bytes);
}

void SharedSegment::free(void* block) noexcept {
  if (block == nullptr || fork_.in_child()) return;
  const auto struck = ledger_.strike(block);
  if (!struck) return;
  // Destroying `struck` frees the block, and then another thread may get it. So madvise(), which
  // erases the contents, comes first.
  const uint64_t bytes = struck->bytes.total();
  if (bytes >= kReturnedBlockBytes && madvise(block, bytes, MADV_REMOVE) != 0) {
    log::error(std::string("a segment cannot give memory back to the kernel: madvise: ") +
               std::strerror(errno));
  }
}

SharedSegmentStats SharedSegment::stats() const {
  SharedSegmentStats stats;
  if (!fork_.in_child()) static_cast<Usage&>(stats) = ledger_.usage();
  stats.size_bytes = size();
  stats.page_bytes = largest_page_bytes(base(), size());
  return stats;
}

std::shared_ptr<SharedSegment> process_segment(Policy policy) {
  process_segments().fork.require_owner("allocate from its parent's segment");
  const std::lock_guard lock(process_segments().mutex);
  auto& segments = process_segments().by_policy;
  const auto found = segments.find(policy);
  if (found != segments.end()) return found->second;
  return segments.emplace(policy, SharedSegment::create(policy, /*size_bytes=*/0)).first->second;
}

uint64_t process_segment_bytes(Policy policy) {
  process_segments().fork.require_owner("ask for the size of its parent's segment");
  const std::lock_guard lock(process_segments().mutex);
  const auto& segments = process_segments().by_policy;
  const auto found = segments.find(policy);
  return found != segments.end() ? found->second->size() : default_segment_bytes();
}

std::map<Policy, SharedSegmentStats> process_segment_stats() {
  std::map<Policy, SharedSegmentStats> stats;
  if (process_segments().fork.in_child()) return stats;
  const std::lock_guard lock(process_segments().mutex);
  for (const auto& [policy, segment] : process_segments().by_policy) {
    stats.emplace(policy, segment->stats());
  }
  return stats;
}

}  // namespace hbm::memory
