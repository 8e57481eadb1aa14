// A rank's area (area.h) for a group that is being made, in its process' segment.
//
// Threads: used by one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/segment.h"

namespace hbm::shm {

class GroupArea {
 public:
  // Lays it out for `members`, of which each stages `chunk_bytes` at a time. Throws
  // Error(kExhausted) when there is no room.
  GroupArea(std::shared_ptr<memory::SharedSegment> segment, size_t members, size_t chunk_bytes);

  // Gives the block back to the segment; if neighbours know of it, once all have left the group,
  // and never if one does not.
  ~GroupArea();
  GroupArea(const GroupArea&) = delete;
  GroupArea& operator=(const GroupArea&) = delete;

  // Returns where it is in the segment, for the neighbours: they may use it from now on.
  uint64_t tell() noexcept;

  // The neighbours do not use it after all, nor will they.
  void disown() noexcept { is_known_ = false; }

  size_t members() const noexcept { return members_; }

  // Gives back those of which all neighbours have left the group by now.
  static void sweep();

 private:
  const std::shared_ptr<memory::SharedSegment> segment_;
  const size_t members_;
  std::byte* const block_;
  bool is_known_ = false;  // to neighbours
};

}  // namespace hbm::shm
