// The memory in the client's process that RDMA transfers use: registered user memory, or registered
// buffers.
//
// The caller's memory may be freed and reused between two transfers. Through a registration cached
// by address, the device would then write into unrelated pages. So memory is registered only if its
// owner says for how long (register_memory()). All other transfers are copied through a fixed set
// of registered buffers; short writes are sent inline.
//
// Threads: one at a time, but any may destroy the handles of register_memory().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "box/transport/slices.h"
#include "box/verbs/client/queue_pair.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/domain.h"

namespace hbm::box::verbs::client {

class LocalBuffers {
 public:
  explicit LocalBuffers(std::shared_ptr<common::Domain> domain) : domain_(std::move(domain)) {}

  // Throws the errors of MemoryRegion.
  std::shared_ptr<common::MemoryRegion> register_memory(std::byte* memory, uint64_t bytes);

  struct SliceBuffer {
    ibv_sge entry{};
    bool is_inline = false;
    Posted uses;
  };

  // Returns a local buffer for a slice; for a write, the buffer has the data. Returns none if no
  // buffer is free. Throws the errors of MemoryRegion.
  std::optional<SliceBuffer> buffer_for(const transport::Slice& slice, uint32_t inline_bytes);

  // Releases the buffer of a completed slice. `arrived`: true if the data of a read have arrived.
  // In that case, first copies the data to the caller's memory.
  void done(const Posted& posted, bool arrived);

 private:
  std::shared_ptr<common::MemoryRegion> registered(const std::byte* memory, uint64_t bytes);

  const std::shared_ptr<common::Domain> domain_;
  std::map<uintptr_t, std::weak_ptr<common::MemoryRegion>> regions_;  // by first address
  std::optional<common::BufferPool> buffers_;
};

}  // namespace hbm::box::verbs::client
