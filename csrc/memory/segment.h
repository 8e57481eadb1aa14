// Memory of this process that the other processes of its node may map. It is a memfd, placed by one
// policy on the NUMA nodes that memkind chooses. Inside are a reserved arena for groups
// (reserved_arena.h), then a memkind heap. Only this process allocates and frees blocks; the memory
// itself is freed with the last process that maps it.
//
// The guarantees of Heap hold (heap.h). Under kBind and kInterleave a request beyond the room of
// the policy's nodes throws Error(kExhausted), and pages are resident when allocate() returns.
// Under kPreferred such a request spills to DDR, page by page as pages are first touched. A
// shortage of HBM never kills the process. The nodes are chosen for the thread that made the
// segment, and never change.
//
// memkind's records are outside of the segment, so a stray write of a peer can corrupt contents but
// not the heap. Freed blocks of less than kReturnedBlockBytes keep their pages for later blocks.
// The thread that freed addresses reuses them first, and some other threads never reuse them. So
// the segment's size is several times its usable memory.
//
// A forked child shares the memory with its parent. The memory is not copied, so the parent sees
// the child's writes. In the child allocate() throws Error(kUnavailable), and free() does nothing.
//
// Threads: every member may be called from any thread. A block costs some 20 us under any policy,
// because the segment asks the kernel for its free memory. Under kBind and kInterleave a block also
// costs the time to touch its pages.
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
#include "memory/reserved_arena.h"
#include "memory/shared_memory.h"

namespace hbm::memory {

// hbm_bytes and ddr_bytes are estimates from the room that the nodes had when each block was
// allocated. placement.h finds the real location of a block.
struct SharedSegmentStats : Usage {
  uint64_t size_bytes = 0;  // addresses, not memory
  uint64_t page_bytes = 0;  // the largest page that the kernel has mapped
};

class SharedSegment {
 public:
  // Makes a segment of `size_bytes` bytes of addresses; 0 means Memfd's default size. Throws
  // Error(kUnavailable) if the policy needs HBM and the machine has none, or the kernel refuses a
  // memfd or its placement. Throws Error(kInvalid) if MEMKIND_HBW_NODES names absent nodes,
  // Error(kExhausted) if address space is short.
  static std::shared_ptr<SharedSegment> create(Policy policy, uint64_t size_bytes);

  // Unmaps all blocks, also blocks that were not freed. Peers keep their mappings.
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), aligned to 64 bytes, or to a page if the block
  // has a page or more. Throws Error(kExhausted) as described above. Under every policy also throws
  // Error(kExhausted) if the whole machine lacks the free memory, or the address space has no gap
  // of that size. The first call makes the heap, and throws Error(kUnavailable) if memkind cannot
  // make it.
  void* allocate(size_t bytes);

  // Allocates a block for a group from the reserved arena, or from the heap if the arena is full.
  // Throws as allocate().
  void* allocate_reserved(size_t bytes);

  // Frees a block of this segment; null is ignored. Large blocks return their pages to the kernel,
  // so a process that still reads them sees zeros.
  void free(void* block) noexcept;

  // Returns true if the segment contains the whole range.
  bool contains(const void* address, size_t bytes) const noexcept {
    const size_t offset = offset_of(address);
    return offset < size() && bytes <= size() - offset;
  }

  // Returns the offset of an address in the segment. For an address outside the segment the value
  // is meaningless, and at least size().
  uint64_t offset_of(const void* address) const noexcept {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base());
  }

  std::byte* base() const noexcept { return memory_.base(); }
  size_t size() const noexcept { return memory_.size(); }
  int fd() const noexcept {
    return memory_.fd();
  }  // owned by the segment; pass it on, or duplicate it

  // Takes milliseconds. In a forked child, the result counts no blocks.
  SharedSegmentStats stats() const;
  Policy policy() const noexcept { return policy_; }

 private:
  SharedSegment(Policy policy, uint64_t size_bytes);

  memkind_t heap();
  // REQUIRES: `bytes` is not 0.
  void* hand_out(OwnedBlock block, size_t bytes);

  const Policy policy_;
  const std::vector<int> nodes_;  // HBM nodes; empty if blocks are DDR
  const ForkGuard fork_;
  const Memfd memory_;
  ReservedArena arena_;
  std::mutex heap_mutex_;     // guards heap_
  memkind_t heap_ = nullptr;  // uses the addresses after the arena; null until needed
  Ledger ledger_;
};

// Returns this process' segment under a policy: of the default size, shared by all groups, made on
// first use and never destroyed. Throws as SharedSegment::create(). Throws Error(kUnavailable) in a
// process forked from a process that used the segment.
std::shared_ptr<SharedSegment> process_segment(Policy policy);

// Returns the size of process_segment(policy) in bytes, without making the segment. A segment that
// is made later may be smaller, down to kLeastDefaultSegmentBytes, if the kernel refuses the
// addresses.
uint64_t process_segment_bytes(Policy policy);

// Returns the statistics of the segments that were used so far; empty in a forked child.
std::map<Policy, SharedSegmentStats> process_segment_stats();

}  // namespace hbm::memory
