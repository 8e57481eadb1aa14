// The client's end of RDMA transfers: memory that its owner has registered, or a buffer that is.
//
// The caller's memory is anything: it may be freed and given out anew at any time between two
// transfers, so that a registration kept by its address would write into somebody else's pages.
// Hence memory is registered only when its owner says for how long (register_memory()); all else is
// copied through a bounded set of buffers that were registered once, and a small write goes inline.
//
// Threads: one at a time, but for the handles that register_memory() returns, which any may drop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "box/transport/slices.h"
#include "box/verbs/client/verbs_lane.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/domain.h"

namespace hbm::verbs {

class LocalBuffers {
 public:
  explicit LocalBuffers(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {}

  // Throws as MemoryRegion.
  std::shared_ptr<MemoryRegion> register_memory(std::byte* memory, uint64_t bytes);

  struct SliceBuffer {
    ibv_sge entry{};
    bool is_inline = false;
    Posted uses;
  };

  // For a slice that is about to be posted; a write's bytes are in place. None: no buffer is free.
  // Throws as MemoryRegion.
  std::optional<SliceBuffer> place(const transport::Slice& slice, uint32_t inline_bytes);

  // The device is done with it. `arrived`: a read's bytes are there, and go to the caller's memory.
  void done(const Posted& posted, bool arrived);

 private:
  std::shared_ptr<MemoryRegion> registered(const std::byte* memory, uint64_t bytes);

  const std::shared_ptr<Domain> domain_;
  std::map<uintptr_t, std::weak_ptr<MemoryRegion>> regions_;  // by first address
  std::optional<BufferPool> buffers_;
};

}  // namespace hbm::verbs
