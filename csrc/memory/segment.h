// Memory of this process that the other processes of its node may map: a memfd placed by one policy
// on the NUMA nodes that memkind chooses for it, with a memkind heap inside, behind a front for
// what groups hold (segment_front.h). Only this process allocates and frees blocks in it; the
// memory itself goes with the last process that maps it.
//
// What a Heap promises holds here (heap.h): a request that the policy's nodes cannot hold throws
// Error(kExhausted) under kBind and kInterleave, whose pages are resident when allocate() returns;
// under kPreferred it spills to DDR, page by page as they are first touched, and nobody is killed
// for lack of memory. The nodes are those closest to the thread that made the segment, and stay.
//
// memkind keeps its own records outside of the segment, so a peer that writes where it must not can
// spoil contents but not the heap. Freed blocks of less than kReturnedBlockBytes keep their pages
// for later blocks. Address space that one thread freed is reused by that thread first, and by some
// threads never: the segment's size is therefore several times what it can hold.
//
// A forked child inherits the memory, shared, not copied: what it writes to a block its parent
// sees. It can neither allocate nor free there: allocate() throws Error(kUnavailable), free() is a
// no-op.
//
// Threads: every member may be called from any thread. A block costs some 20 us under any policy
// (the kernel is asked how much is free), and the time to touch its pages under kBind and
// kInterleave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "memory/block.h"
#include "memory/policy.h"
#include "memory/segment_front.h"
#include "memory/shared_memory.h"

namespace hbm::memory {

// hbm_bytes and ddr_bytes go by the room that the nodes had when a block was allocated;
// placement.h tells where one is.
struct SharedSegmentStats : Usage {
  uint64_t size_bytes = 0;  // of the address space, not of memory
  uint64_t page_bytes = 0;  // of the largest page that the kernel gave
};

class SharedSegment {
 public:
  // `size_bytes` of address space; 0 is Memfd's default.
  // Throws Error(kUnavailable) when the policy needs HBM and the machine has none, or the kernel
  // refuses a memfd or its placement; Error(kInvalid) when MEMKIND_HBW_NODES names nodes that do
  // not exist; Error(kExhausted) when address space is short.
  static std::shared_ptr<SharedSegment> create(Policy policy, uint64_t size_bytes);

  // Blocks that were not freed are gone here; peers keep theirs until they unmap.
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), aligned to 64 bytes, or to a page from a page
  // up. Throws Error(kExhausted) as said above, under every policy for a request past what the
  // whole machine has free, and when the address space has no gap of that size; Error(kUnavailable)
  // when memkind cannot make its heap, which the first call does.
  void* allocate(size_t bytes);

  // The same for what a group holds: needs no heap as long as the front has room.
  void* allocate_in_front(size_t bytes);

  // `block` is null or came from this segment's allocate() or allocate_in_front(). Large blocks
  // give their pages back to the kernel: a process that still reads them sees zeros.
  void free(void* block) noexcept;

  // Whether all of the range lies in the segment.
  bool contains(const void* address, size_t bytes) const noexcept {
    const size_t offset = offset_of(address);
    return offset < size() && bytes <= size() - offset;
  }

  // REQUIRES: contains(address, 0), else the value means nothing.
  uint64_t offset_of(const void* address) const noexcept {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base());
  }

  std::byte* base() const noexcept { return memory_.base(); }
  size_t size() const noexcept { return memory_.size(); }
  int fd() const noexcept {
    return memory_.fd();
  }  // the segment's own; pass it on, or duplicate it

  // In a forked child nothing is in use. Costs milliseconds.
  SharedSegmentStats stats() const;
  Policy policy() const noexcept { return policy_; }

 private:
  SharedSegment(Policy policy, uint64_t size_bytes);

  memkind_t heap();
  // REQUIRES: `bytes` is not 0.
  void* hand_out(OwnedBlock block, size_t bytes);

  const Policy policy_;
  const std::vector<int> nodes_;  // of HBM; empty when blocks are plain DDR
  const ForkGuard fork_;
  const Memfd memory_;
  SegmentFront front_;
  std::mutex heap_mutex_;     // guards heap_
  memkind_t heap_ = nullptr;  // behind the front; null until it is needed
  Ledger ledger_;
};

// The segment of this process under a policy, of the default size, shared by all groups; made on
// first use and never destroyed. Throws Error(kUnavailable) in a process forked from one that used
// it, and as SharedSegment::create().
std::shared_ptr<SharedSegment> process_segment(Policy policy);

// The statistics of the segments that were used so far; none in a forked child.
std::map<Policy, SharedSegmentStats> process_segment_stats();

}  // namespace hbm::memory
