// A heap of private memory under one policy. Small blocks come from memkind, and large blocks have
// their own mappings.
//
// A shortage of HBM never kills the process. If the policy's nodes lack free memory, a request
// throws Error(kExhausted) (kBind, kInterleave) or spills to DDR (kPreferred), before a page is
// touched. If the nodes fill up while a request touches its pages, the request frees them and
// throws. Under kBind and kInterleave the pages of a block are resident when allocate() returns, so
// granted memory cannot be missing later. Under kPreferred and kDdr pages become resident when
// first touched, and the kernel uses DDR if HBM is full by then. (The memory limit of a container
// is independent: the kernel enforces it by killing, on any node.)
//
// A block of kMappedBlockBytes or more has a mapping of its own, with no more pages than it needs,
// on the nodes that memkind chooses. When the block is freed, the kernel gets the memory back.
// memkind allocates smaller blocks. If memkind has no memory for such a block, the block has its
// own mapping too. memkind keeps freed memory for later blocks on the same node, so a thread that
// has moved to another node may get memory of its earlier node. placement.h finds the real location
// of a block.
//
// In a forked child allocate() throws Error(kUnavailable), and free() does nothing: the parent
// still owns the blocks.
//
// Threads: every member may be called from any thread. A block costs some 20 us under the HBM
// policies, because the heap asks the kernel for the node's free bytes. So use staging.h for small
// and frequent requests.
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
  // Throws Error(kUnavailable) if the policy needs HBM and the machine has none, Error(kInvalid) if
  // MEMKIND_HBW_NODES names absent nodes.
  explicit Heap(Policy policy);

  // Blocks that were not freed stay valid, but leak.
  ~Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), aligned to 64 bytes, or to a page if the block
  // has a page or more. Throws Error(kExhausted) as described above. Under every policy also throws
  // Error(kExhausted) if the whole machine lacks the free memory, or the kernel refuses the
  // mapping. Throws Error(kUnavailable) if the kernel refuses to place the block (kBind,
  // kInterleave), or if the kernel's figures of free memory cannot be read.
  void* allocate(size_t bytes);

  // `block` is null or came from this heap's allocate().
  void free(void* block) noexcept;

  // Returns zeros in a forked child, which owns nothing.
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
