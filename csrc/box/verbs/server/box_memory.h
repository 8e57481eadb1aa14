// The memory of a box's segments, registered with an RDMA device, and who may reach it.
//
// A segment's memory is registered once, when it is allocated. What a client gets is a set of keys
// of its own, one for each of its queue pairs: memory windows of type 2, which the device honours
// on that queue pair alone, for exactly the segment's bytes, for reading or for both, and no longer
// than the attachment lives. On a device without such windows every client that attaches a segment
// gets the same key of the registration, one to read or one to write: docs/memory-box.md says what
// that lets a hostile client do.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "box/server/storage/segment.h"
#include "box/verbs/common/domain.h"

namespace hbm::verbs {

class BoxMemory {
 public:
  // `windows`: to use them where the device has them.
  BoxMemory(std::shared_ptr<Domain> domain, bool windows);

  bool windows() const noexcept { return windows_; }

  // Sets segment.registration. Throws as MemoryRegion.
  void add(box::BoxSegment& segment) const;

  // The remote key of a segment that was added. REQUIRES: !windows().
  static uint32_t shared_key(const box::BoxSegment& segment, bool may_write);

 private:
  friend class MemoryWindow;
  struct Registered {
    std::optional<MemoryRegion> writable;  // for windows, nobody's without one
    std::optional<MemoryRegion> readable;
  };
  static const Registered& of(const box::BoxSegment& segment);

  const std::shared_ptr<Domain> domain_;
  const bool windows_;
};

// One client's access to a segment by one queue pair: none until bind()'s request is completed, and
// none any more once this is destroyed.
class MemoryWindow {
 public:
  // Throws Error(kExhausted) when the device has no window left.
  MemoryWindow(const Domain& domain, std::shared_ptr<box::BoxSegment> segment, bool may_write);
  ~MemoryWindow();
  MemoryWindow(MemoryWindow&& other) noexcept;
  MemoryWindow& operator=(MemoryWindow&&) = delete;

  // Posts the request, signalled, under `wr_id`. Throws Error(kUnavailable).
  void bind(ibv_qp* queue_pair, uint64_t wr_id);

  uint32_t key() const noexcept { return key_; }  // of the last bind()

 private:
  std::shared_ptr<box::BoxSegment> segment_;
  bool may_write_;
  ibv_mw* window_;
  uint32_t key_ = 0;
};

}  // namespace hbm::verbs
