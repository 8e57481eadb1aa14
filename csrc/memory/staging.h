// Staging memory for messages: blocks of a heap, cached for reuse, within a bounded total.
//
// The pool never waits until a block is released, because the block's holder may itself wait for a
// peer that waits for this process in another group. Then all would wait forever. So a request
// beyond the budget gets ordinary memory (kPreferred, kDdr), which is returned to the system on
// release, or throws Error(kExhausted) (kBind, kInterleave).
//
// Blocks of up to kLargestStagingClassBytes are rounded up to a power of two. A released block is
// cached in a list of its size. So a later request of that size takes only a lock and a list
// operation, and calls neither memkind nor the kernel. Larger blocks return to the heap. Cached
// blocks count against the budget; they are returned to the heap before a request is refused.
//
// An operation in several parts releases the memory of a part under a StagingHold, so that its next
// part gets the same memory.
//
// Ownership: the pool lives as long as any of its buffers, so a buffer may outlive its group. In a
// forked child acquire() throws Error(kUnavailable), and releasing inherited buffers has no effect.
//
// Threads: every member may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/fork.h"
#include "memory/heap.h"
#include "memory/tuning.h"

namespace hbm::memory {

class StagingPool;

// A block of staging memory, returned to its pool by the destructor. Move-only.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  StagingBuffer(StagingBuffer&& other) noexcept { swap(other); }
  StagingBuffer& operator=(StagingBuffer&& other) noexcept {
    StagingBuffer(std::move(other)).swap(*this);
    return *this;
  }
  ~StagingBuffer();

  void* data() const noexcept { return block_; }
  size_t size() const noexcept { return size_; }  // as requested
  explicit operator bool() const noexcept { return block_ != nullptr; }

  void swap(StagingBuffer& other) noexcept;

 private:
  friend class StagingHold;
  friend class StagingPool;
  StagingBuffer(std::shared_ptr<StagingPool> pool, void* block, size_t size, size_t capacity,
                bool overflow)
      : pool_(std::move(pool)),
        block_(block),
        size_(size),
        capacity_(capacity),
        overflow_(overflow) {}

  std::shared_ptr<StagingPool> pool_;
  void* block_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;    // counted against the budget
  bool overflow_ = false;  // beyond the budget: ordinary memory, never cached
};

// Keeps up to kHeldStagingBlocks blocks that the calling thread releases, and gives them to the
// thread's next requests. So no other thread takes the memory between two parts of an operation, if
// the next part needs no more than the last one. Remaining blocks return to their pools when this
// object is destroyed, or when a request of the thread finds the budget of its pool used up.
//
// Threads: the thread that makes a hold also destroys it. A thread has at most one hold at a time.
class StagingHold {
 public:
  StagingHold();
  ~StagingHold();
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;

 private:
  friend class StagingBuffer;
  friend class StagingPool;
  // Returns the calling thread's hold; null if it has none.
  static StagingHold*& current() noexcept;

  // Takes over the block of `released`. Returns false if kHeldStagingBlocks are held already.
  bool keep(StagingBuffer& released) noexcept;
  // Returns the smallest block of `pool` with room for `bytes`; empty if there is none.
  StagingBuffer take(const StagingPool& pool, size_t bytes) noexcept;
  void release() noexcept;

  std::array<StagingBuffer, kHeldStagingBlocks> held_;
};

struct StagingStats {
  uint64_t budget_bytes = 0;
  uint64_t reserved_bytes = 0;  // taken from the heap: in use or cached
  uint64_t cached_bytes = 0;    // of reserved_bytes: released and cached
  uint64_t overflow_bytes = 0;  // in use beyond the budget, in ordinary memory
  uint64_t overflows = 0;       // requests beyond the budget since the pool was made
};

class StagingPool : public std::enable_shared_from_this<StagingPool> {
 public:
  // The budget bounds reserved_bytes. With 0 every request is beyond the budget (see the top of the
  // file).
  static std::shared_ptr<StagingPool> make(std::shared_ptr<Heap> heap, uint64_t budget_bytes);
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), uninitialised, aligned to 64 bytes, or to a
  // page if the block has a page or more. Throws Error(kExhausted) as described above, and as
  // Heap::allocate().
  StagingBuffer acquire(size_t bytes);

  // Returns a block as acquire() does, or an empty buffer if the budget has no room for it. Throws
  // as Heap::allocate().
  StagingBuffer acquire_within_budget(size_t bytes);

  // Returns true if a request beyond the budget gets ordinary memory, and false if it throws.
  bool overflows() const noexcept;
  uint64_t budget_bytes() const noexcept { return budget_bytes_; }

  // Returns the cached blocks to the heap.
  void trim() noexcept;

  // In a forked child all values except the budget are zero.
  StagingStats stats() const;

 private:
  friend class StagingBuffer;

  // The first bytes of a cached block hold the link to the next block.
  struct Link {
    Link* next;
  };
  struct Shelf {
    mutable std::mutex mutex;  // guards the members below
    Link* first = nullptr;
    uint64_t count = 0;
  };
  static constexpr size_t kClasses = 19;  // 64 B, 128 B, ... 16 MiB
  static_assert(kLeastStagingClassBytes << (kClasses - 1) == kLargestStagingClassBytes);

  StagingPool(std::shared_ptr<Heap> heap, uint64_t budget_bytes);

  Shelf& shelf_for(size_t capacity) noexcept;
  bool reserve(size_t capacity) noexcept;
  void unreserve(size_t capacity) noexcept;
  void* take_cached(size_t capacity) noexcept;
  void* take_new(size_t capacity);
  StagingBuffer overflow(size_t bytes);  // REQUIRES: overflows()
  void release(void* block, size_t capacity, bool overflow) noexcept;

  const std::shared_ptr<Heap> heap_;
  const ForkGuard fork_;
  const uint64_t budget_bytes_;
  Heap overflow_heap_{Policy::kDdr};
  std::atomic<uint64_t> reserved_bytes_{0};
  // Held by trim() until it has returned all its blocks to the heap. So another thread's trim()
  // first waits, and then the budget of these blocks is free. Locked before a shelf's mutex.
  std::mutex trim_mutex_;
  std::array<Shelf, kClasses> shelves_;
};

// Returns this process' pool with this policy and budget: shared by all groups, made on first use
// and never destroyed. Throws as Heap. Throws Error(kUnavailable) in a process forked from a
// process that used the pool.
std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes);

}  // namespace hbm::memory
