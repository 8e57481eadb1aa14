#include "communicator/shm/group_area.h"

#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "communicator/shm/area.h"
#include "communicator/shm/shm_group.h"

namespace hbm::shm {
namespace {

// A block of the segment that neighbours may still look at when its group is gone.
struct OldArea {
  std::shared_ptr<memory::SharedSegment> segment;
  std::byte* block;
  size_t members;
};

class OldAreas {
 public:
  static OldAreas& all() {
    static auto* const areas = new OldAreas;
    return *areas;
  }

  void add(OldArea area) {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    areas_.push_back(std::move(area));
  }

  // Gives back those that nobody looks at any more.
  void sweep() {
    if (fork_.in_child()) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(areas_, [](const OldArea& area) {
      if (!ShmGroup::released(area.block, area.members)) return false;
      area.segment->free(area.block);
      return true;
    });
  }

 private:
  const ForkGuard fork_;
  std::mutex mutex_;
  std::vector<OldArea> areas_;  // guarded by mutex_
};

std::byte* lay_out(memory::SharedSegment& segment, const AreaLayout& layout) {
  OldAreas::all().sweep();
  auto* const block = static_cast<std::byte*>(segment.allocate_in_front(layout.total));
  format_area(block, layout);
  return block;
}

}  // namespace

GroupArea::GroupArea(std::shared_ptr<memory::SharedSegment> segment, size_t members,
                     size_t chunk_bytes)
    : segment_(std::move(segment)),
      members_(members),
      block_(lay_out(*segment_, AreaLayout(members, chunk_bytes))) {}

GroupArea::~GroupArea() {
  if (!is_known_) {
    segment_->free(block_);
    return;
  }
  OldAreas::all().add({segment_, block_, members_});
  sweep();
}

uint64_t GroupArea::tell() noexcept {
  is_known_ = true;
  return segment_->offset_of(block_);
}

void GroupArea::sweep() { OldAreas::all().sweep(); }

}  // namespace hbm::shm
