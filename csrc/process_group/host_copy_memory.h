// Memory for the host copies of a device's tensors, in a segment of this process, pinned for the
// device. The device copies to and from this memory, and the ranks of the node reduce the host
// copies in place, so the host itself copies nothing.
//
// A block is pinned once and cached for later host copies, because pinning takes as long as
// copying. Unused blocks are released when the segment or the device has no memory left.
//
// Threads: every member may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "memory/segment.h"
#include "process_group/host_registration.h"

namespace hbm::process_group {

class HostCopyMemory {
 public:
  // Returns the pinned memory for `segment` and `type`. The result is never destroyed, and keeps
  // `segment` alive. Returns null if the device cannot pin existing memory.
  static HostCopyMemory* of(const std::shared_ptr<memory::SharedSegment>& segment,
                            c10::DeviceType type);

  // Returns a flat tensor that owns a block. Returns an undefined tensor for less than
  // kPinnedHostCopyBytes, or if no more memory can be pinned.
  at::Tensor take(int64_t elements, at::ScalarType type);

 private:
  HostCopyMemory(std::shared_ptr<memory::SharedSegment> segment,
                 const HostRegistration& registration)
      : segment_(std::move(segment)), registration_(registration) {}

  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  Block take_cached(size_t bytes);
  Block make(size_t bytes);
  void release_cached();
  void cache(const Block& block);

  const std::shared_ptr<memory::SharedSegment> segment_;
  const HostRegistration& registration_;

  std::mutex mutex_;                     // guards cached_
  std::multimap<size_t, void*> cached_;  // by size
};

}  // namespace hbm::process_group
