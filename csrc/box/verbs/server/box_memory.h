// The memory of a box's segments, registered with an RDMA device, and the access of clients to it.
//
// A segment's memory is registered once, when it is allocated. With an attachment, a client gets a
// key for each of its queue pairs: the key of a memory window of type 2. The device accepts the key
// only on that queue pair, for exactly the bytes of the segment, and while the attachment exists.
// The key permits reads, or reads and writes.
//
// On a device without such windows, all clients of a segment share two keys of its registration:
// one permits reads, the other reads and writes. docs/memory-box.md describes the risk of hostile
// clients on such a device.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "box/server/storage/segment.h"
#include "box/verbs/common/domain.h"

namespace hbm::box::verbs::server {

class BoxMemory {
 public:
  // `windows`: if true, uses memory windows if the device has them.
  BoxMemory(std::shared_ptr<common::Domain> domain, bool windows);

  bool windows() const noexcept { return windows_; }

  // Registers the memory, and sets segment.registration. Throws the errors of MemoryRegion.
  void add(box::server::storage::BoxSegment& segment) const;

  // Returns the remote key of an added segment. REQUIRES: !windows().
  static uint32_t shared_key(const box::server::storage::BoxSegment& segment, bool may_write);

 private:
  friend class MemoryWindow;
  struct Registered {
    // With windows, the windows are bound to this region, and give remote access to it. Without
    // windows, the region's own key permits remote reads and writes.
    std::optional<common::MemoryRegion> writable;
    std::optional<common::MemoryRegion> readable;  // only without windows: for remote reads
  };
  static const Registered& of(const box::server::storage::BoxSegment& segment);

  const std::shared_ptr<common::Domain> domain_;
  const bool windows_;
};

// A client's access to a segment over one queue pair, from the completion of bind() until the
// destructor.
class MemoryWindow {
 public:
  // Throws Error(kExhausted) if the device has no window left.
  MemoryWindow(const common::Domain& domain,
               std::shared_ptr<box::server::storage::BoxSegment> segment, bool may_write);
  ~MemoryWindow();
  MemoryWindow(MemoryWindow&& other) noexcept;
  MemoryWindow& operator=(MemoryWindow&&) = delete;

  // Posts the bind request, signalled, with `wr_id`. Throws Error(kUnavailable).
  void bind(ibv_qp* queue_pair, uint64_t wr_id);

  uint32_t key() const noexcept { return key_; }  // set by bind()

 private:
  std::shared_ptr<box::server::storage::BoxSegment> segment_;
  bool may_write_;
  ibv_mw* window_;
  uint32_t key_ = 0;
};

}  // namespace hbm::box::verbs::server
