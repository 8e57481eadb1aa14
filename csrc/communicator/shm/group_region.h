// A rank's control region (control_region.h) for a group that is being formed, in the segment of
// its process.
//
// Threads: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/segment.h"

namespace hbm::communicator::shm {

class GroupRegion {
 public:
  // Allocates and initialises a region for `local_size` ranks that stage `chunk_bytes` at a time.
  // Throws Error(kExhausted) if the segment has no room.
  GroupRegion(std::shared_ptr<memory::SharedSegment> segment, size_t local_size,
              size_t chunk_bytes);

  // Frees the region's block. If the region was published, the block is freed only after all local
  // peers have destroyed their ShmGroup. It is never freed if a local peer's process ends without
  // destroying its ShmGroup.
  ~GroupRegion();
  GroupRegion(const GroupRegion&) = delete;
  GroupRegion& operator=(const GroupRegion&) = delete;

  // Returns the region's offset in the segment. From this call on local peers may use the region.
  uint64_t publish() noexcept;

  // Declares that no local peer uses the region, now or later.
  void disown() noexcept { is_known_ = false; }

  size_t local_size() const noexcept { return local_size_; }

  // Frees the blocks of destroyed regions that no local peer uses any more.
  static void sweep();

 private:
  const std::shared_ptr<memory::SharedSegment> segment_;
  const size_t local_size_;
  std::byte* const block_;
  bool is_known_ = false;  // to local peers
};

}  // namespace hbm::communicator::shm
