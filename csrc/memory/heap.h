// A heap of private memory under one policy: memkind's memory, and mappings of its own.
//
// Nothing here is ever killed for lack of memory: a request past what the policy's nodes have free
// throws Error(kExhausted) (kBind, kInterleave) or spills to DDR (kPreferred) before a page is
// touched. Under kBind and kInterleave the pages of a block are resident when allocate() returns,
// so that what was granted cannot be missing later; under kPreferred and kDdr they come when they
// are first touched, and the kernel sends to DDR what HBM no longer holds by then. (A container's
// own memory limit is outside of all this: the kernel enforces it by killing, whatever the node.)
//
// A block of kMappedBlockBytes or more is mapped at exactly its pages, on the nodes that memkind
// chooses, and goes back to the kernel when it is freed. Smaller ones are memkind's, which keeps
// freed memory for later blocks, on the node it came from: a thread that has moved to another node
// may get memory of the old one. placement.h tells where a block really is.
//
// A forked child must neither allocate nor free: allocate() throws Error(kUnavailable) there, and
// free() is a no-op, because the parent still owns the blocks.
//
// Threads: every member may be called from any thread. A block costs some 20 us under the HBM
// policies (the kernel is asked for the node's free bytes): staging.h is for small and frequent
// requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/fork.h"
#include "memory/block.h"
#include "memory/policy.h"

namespace hbm::memory {

class Heap {
 public:
  // Throws Error(kUnavailable) when the policy needs HBM and the machine has none, and
  // Error(kInvalid) when MEMKIND_HBW_NODES names nodes that do not exist.
  explicit Heap(Policy policy);

  // Blocks that were not freed stay valid, and are lost.
  ~Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), aligned to 64 bytes, or to a page from a page
  // up. Throws Error(kExhausted) as said above, and under every policy for a request past what the
  // whole machine has free, or the kernel refuses to map; Error(kUnavailable) when it refuses,
  // under kBind and kInterleave, to place the block, and when its figures cannot be read.
  void* allocate(size_t bytes);

  // `block` is null or came from this heap's allocate().
  void free(void* block) noexcept;

  // In a forked child all is zero: it owns nothing.
  Usage stats() const;
  Policy policy() const noexcept { return policy_; }

 private:
  void* allocate_hbm(size_t bytes);
  void* allocate_ddr(size_t bytes);
  void require_room(size_t bytes, const std::vector<int>& nodes, uint64_t fitting) const;

  const Policy policy_;
  const bool has_hbm_;  // the policy wants HBM and memkind has it
  const ForkGuard fork_;
  Ledger ledger_;
};

}  // namespace hbm::memory
