// A bounded pool of memory that other processes can map, block by block.
//
// The pool reserves a range of addresses, which a buddy allocator hands out. Each block in use is
// backed by a file of its own, a memfd unless the caller brings one, so that a process that is
// given a block's descriptor can reach that block and nothing else. A block's memory goes back to
// the kernel when the block goes.
//
// Memory is placed by a Policy as SharedSegment's is (segment.h): memfds on the nodes that memkind
// chose for the thread that made the pool; under kBind and kInterleave their pages are resident
// when allocate() returns, and a shortage throws; under kPreferred it spills. A file that the
// caller brings lies where its file system puts it: kBind and kInterleave refuse it, kPreferred
// says so once in the log.
//
// Blocks are not mapped in forked children, which may destroy what they inherit, without effect,
// and not otherwise use it.
//
// Threads: every member may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/descriptor.h"
#include "base/fork.h"
#include "memory/buddy.h"
#include "memory/policy.h"
#include "memory/tuning.h"

namespace hbm::memory {

class Pool;

// Mapped for reading and writing, shared; lives as long as someone points to it. The size of a
// memfd is fixed. A file that the caller brought can be cut short through fd(), and an access past
// its end kills by SIGBUS.
class PoolBlock {
 public:
  ~PoolBlock();
  PoolBlock(const PoolBlock&) = delete;
  PoolBlock& operator=(const PoolBlock&) = delete;

  std::byte* base() const noexcept { return base_; }
  uint64_t size() const noexcept { return size_; }  // bytes asked for, rounded up to pages
  int fd() const noexcept { return file_.get(); }   // for reading and writing; pass on or duplicate

  // A new descriptor through which the memory can be read and not written. Of a memfd, processes of
  // the owner's user (and root) could make a writable one of it, through /proc; others cannot.
  // Throws Error(kUnavailable) when the kernel refuses.
  Descriptor read_only() const;

 private:
  friend class Pool;
  PoolBlock(std::shared_ptr<Pool> pool, Descriptor file, uint64_t size, bool ours);

  const std::shared_ptr<Pool> pool_;
  const Descriptor file_;
  const uint64_t size_;
  const bool ours_;            // a memfd of the pool's
  std::byte* base_ = nullptr;  // null until the pool gave it addresses
};

struct PoolOptions {
  Policy policy = Policy::kPreferred;
  uint64_t capacity = 0;                           // bytes of memory, over all blocks
  uint64_t smallest_block = kLeastPoolBlockBytes;  // of addresses; powers of two
  uint64_t largest_block = kLargestPoolBlockBytes;
};

struct PoolStats {
  uint64_t capacity = 0;
  uint64_t used = 0;  // bytes of memory in blocks, in whole pages
  uint64_t blocks = 0;
  uint64_t largest_free = 0;  // what one block could still have
  double fragmentation = 0;   // of the addresses, see buddy.h
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Throws Error(kInvalid) for sizes that make no pool, Error(kExhausted) when the address space
  // is short, Error(kUnavailable) when the policy needs HBM and the machine has none.
  static std::shared_ptr<Pool> create(const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // `bytes` of zeros in a memfd. A process that still maps it when the block goes sees zeros.
  // Throws Error(kInvalid) for no bytes, Error(kExhausted) when the capacity, the policy's nodes or
  // the machine cannot hold them, or they are past the largest block, Error(kUnavailable) when the
  // kernel gives no memfd (each block has a descriptor open) or no mapping.
  std::shared_ptr<PoolBlock> allocate(uint64_t bytes);

  // The contents of `file`, which is open for reading and writing. Throws as allocate(), and
  // Error(kInvalid) when it has fewer bytes, Error(kUnsupported) under kBind and kInterleave.
  std::shared_ptr<PoolBlock> map(Descriptor file, uint64_t bytes);

  PoolStats stats() const;
  const PoolOptions& options() const noexcept { return options_; }

 private:
  friend class PoolBlock;
  explicit Pool(const PoolOptions& options);
  std::shared_ptr<PoolBlock> place(Descriptor file, uint64_t bytes, bool ours);
  std::byte* take_addresses(uint64_t size);
  void release(const PoolBlock& block) noexcept;

  const PoolOptions options_;
  const ForkGuard fork_;
  const std::vector<int> nodes_;  // of HBM; empty when memory is plain DDR
  const uint64_t
      space_;  // addresses reserved: several times the capacity, as blocks are rounded up
  std::byte* const base_;

  mutable std::mutex mutex_;  // guards all below
  Buddy buddy_;
  uint64_t used_ = 0;
  uint64_t blocks_ = 0;
};

}  // namespace hbm::memory
