#include "communicator/shm/group_region.h"

#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/life_sign.h"
#include "communicator/shm/control_region.h"
#include "communicator/shm/shm_group.h"

namespace hbm::communicator::shm {
namespace {

// The block of a published region whose GroupRegion was destroyed. Local peers may still use it.
struct OldRegion {
  std::shared_ptr<memory::SharedSegment> segment;
  std::byte* block;
  size_t local_size;
};

void free_region(memory::SharedSegment& segment, std::byte* block) noexcept {
  take_down(control_of(block).life);
  segment.free(block);
}

class OldRegions {
 public:
  static OldRegions& all() {
    static auto* const regions = new OldRegions;
    return *regions;
  }

  void add(OldRegion region) {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    regions_.push_back(std::move(region));
  }

  // Frees the regions that no local peer uses any more.
  void sweep() {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(regions_, [](const OldRegion& region) {
      if (!ShmGroup::released(region.block, region.local_size)) return false;
      free_region(*region.segment, region.block);
      return true;
    });
  }

 private:
  const ForkGuard fork_;
  std::mutex mutex_;
  std::vector<OldRegion> regions_;  // guarded by mutex_
};

std::byte* lay_out(memory::SharedSegment& segment, const RegionLayout& layout) {
  OldRegions::all().sweep();
  auto* const block = static_cast<std::byte*>(segment.allocate_reserved(layout.total));
  format_region(block, layout);
  put_up(control_of(block).life);
  return block;
}

}  // namespace

GroupRegion::GroupRegion(std::shared_ptr<memory::SharedSegment> segment, size_t local_size,
                         size_t chunk_bytes)
    : segment_(std::move(segment)),
      local_size_(local_size),
      block_(lay_out(*segment_, RegionLayout(local_size, chunk_bytes))) {}

GroupRegion::~GroupRegion() {
  if (!is_known_) {
    free_region(*segment_, block_);
    return;
  }
  OldRegions::all().add({segment_, block_, local_size_});
  sweep();
}

uint64_t GroupRegion::publish() noexcept {
  is_known_ = true;
  return segment_->offset_of(block_);
}

void GroupRegion::sweep() { OldRegions::all().sweep(); }

}  // namespace hbm::communicator::shm
