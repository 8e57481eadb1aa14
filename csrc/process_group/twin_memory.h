// Memory for the twins of a device's tensors in a segment of this process, pinned for the device:
// it copies to and from there, and the ranks of the node reduce where the twins lie, so that the
// host copies nothing.
//
// A block is pinned once and kept for later twins, since pinning takes the time of copying. Blocks
// that no twin uses are given back when the segment or the device has no more.
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

namespace hbm {

class TwinMemory {
 public:
  // That of a segment and a device type, which stays for good, as the segment must; null if the
  // device cannot pin memory that exists already.
  static TwinMemory* of(const std::shared_ptr<memory::SharedSegment>& segment,
                        c10::DeviceType type);

  // A flat tensor that holds a block; undefined if it is small, or there is no more memory that can
  // be pinned.
  at::Tensor take(int64_t elements, at::ScalarType type);

 private:
  TwinMemory(std::shared_ptr<memory::SharedSegment> segment, const HostRegistration& registration)
      : segment_(std::move(segment)), registration_(registration) {}

  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  Block take_kept(size_t bytes);
  Block make(size_t bytes);
  void give_back_kept();
  void keep(const Block& block);

  const std::shared_ptr<memory::SharedSegment> segment_;
  const HostRegistration& registration_;

  std::mutex mutex_;                   // guards the member below
  std::multimap<size_t, void*> kept_;  // by size
};

}  // namespace hbm
