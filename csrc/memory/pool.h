// A bounded pool of memory that other processes can map, block by block.
//
// The pool reserves a range of addresses, which a buddy allocator manages. Each block in use is
// backed by its own file: a memfd, unless the caller passes a file. So a process with a block's
// descriptor can reach only that block. A block's memory returns to the kernel when the block is
// destroyed.
//
// Memory is placed by a Policy, as in SharedSegment (segment.h): memfds are on the nodes that
// memkind chose for the thread that made the pool. Under kBind and kInterleave their pages are
// resident when allocate() returns, and a shortage throws; under kPreferred pages spill to DDR. The
// file system places a caller's file, so map() throws Error(kUnsupported) under kBind and
// kInterleave; under kPreferred it logs once that the policy has no effect.
//
// Forked children do not map blocks. A child may destroy inherited objects, without effect, and
// must not use them otherwise.
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

// A shared mapping for reading and writing, which lives as long as its last reference. The size of
// a memfd is fixed. The caller's file can be truncated through fd(), and an access beyond its end
// kills the process by SIGBUS.
class PoolBlock {
 public:
  ~PoolBlock();
  PoolBlock(const PoolBlock&) = delete;
  PoolBlock& operator=(const PoolBlock&) = delete;

  std::byte* base() const noexcept { return base_; }
  uint64_t size() const noexcept { return size_; }  // bytes asked for, rounded up to pages
  int fd() const noexcept { return file_.get(); }   // for reading and writing; pass on or duplicate

  // Returns a new descriptor that can read the memory and not write it. Processes of the owner's
  // user (and root) can reopen a memfd for writing through /proc; other processes cannot. Throws
  // Error(kUnavailable) if the kernel refuses.
  Descriptor read_only() const;

 private:
  friend class Pool;
  PoolBlock(std::shared_ptr<Pool> pool, Descriptor file, uint64_t size, bool ours);

  const std::shared_ptr<Pool> pool_;
  const Descriptor file_;
  const uint64_t size_;
  const bool ours_;            // a memfd that the pool has made
  std::byte* base_ = nullptr;  // null until the pool has assigned addresses
};

struct PoolOptions {
  Policy policy = Policy::kPreferred;
  uint64_t capacity = 0;  // bytes of memory, over all blocks
  // The smallest and the largest range of addresses that a block takes, in bytes; powers of two.
  uint64_t smallest_block = kLeastPoolBlockBytes;
  uint64_t largest_block = kLargestPoolBlockBytes;
};

struct PoolStats {
  uint64_t capacity = 0;
  uint64_t used = 0;  // bytes of memory in blocks, in whole pages
  uint64_t blocks = 0;
  uint64_t largest_free = 0;  // the largest block that still fits
  double fragmentation = 0;   // of the addresses, see buddy.h
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Throws Error(kInvalid) for invalid sizes, Error(kExhausted) if the address space is short,
  // Error(kUnavailable) if the policy needs HBM and the machine has none.
  static std::shared_ptr<Pool> create(const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns `bytes` of zeros in a memfd. If another process still maps the memfd when the block is
  // destroyed, it sees zeros from then on. Throws Error(kInvalid) for 0 bytes. Throws
  // Error(kExhausted) if the capacity, the policy's nodes or the machine lack memory, or the block
  // is larger than the largest block. Throws Error(kUnavailable) if the kernel refuses a memfd
  // (each block keeps a descriptor open) or a mapping.
  std::shared_ptr<PoolBlock> allocate(uint64_t bytes);

  // Returns a block with the contents of `file`, which is open for reading and writing. Throws as
  // allocate(), and Error(kInvalid) if the file is shorter than `bytes` or not a regular file,
  // Error(kUnsupported) under kBind and kInterleave.
  std::shared_ptr<PoolBlock> map(Descriptor file, uint64_t bytes);

  PoolStats stats() const;
  const PoolOptions& options() const noexcept { return options_; }

 private:
  friend class PoolBlock;
  explicit Pool(const PoolOptions& options);
  std::shared_ptr<PoolBlock> make_block(Descriptor file, uint64_t bytes, bool ours);
  std::byte* take_addresses(uint64_t size);
  void release(const PoolBlock& block) noexcept;

  const PoolOptions options_;
  const ForkGuard fork_;
  const std::vector<int> nodes_;  // HBM nodes; empty if memory is DDR
  const uint64_t
      space_;  // reserved addresses: several times the capacity, because blocks are rounded up
  std::byte* const base_;

  mutable std::mutex mutex_;  // guards the members below
  Buddy buddy_;
  uint64_t used_ = 0;
  uint64_t blocks_ = 0;
};

}  // namespace hbm::memory
