// Staging memory for messages: blocks of a heap, kept for reuse, within a bounded total.
//
// The pool never waits for a block to come back: its holder may be waiting for a peer that waits
// for this process in another group, and the wait would never end. A request past the budget gets
// ordinary memory instead (kPreferred, kDdr), returned to the system when it is released, or
// Error(kExhausted) (kBind, kInterleave).
//
// Blocks of up to kLargestStagingClassBytes are rounded up to a power of two and kept on a list per
// size when released: from then on a request of that size costs a lock and a list operation, and
// neither memkind nor the kernel is asked. Larger ones go back to the heap. Kept blocks count
// against the budget; when it is short they are returned to the heap before a request is refused.
//
// An operation that gives back what its next part needs at once does so under a StagingHold.
//
// Ownership: the pool lives as long as any of its buffers, so a buffer may outlive the group that
// took it. In a forked child acquire() throws Error(kUnavailable), and buffers inherited from the
// parent are released without effect.
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
  size_t size() const noexcept { return size_; }  // as asked for
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
  size_t capacity_ = 0;    // what the block counts in the budget
  bool overflow_ = false;  // past the budget: ordinary memory that the pool does not keep
};

// Keeps what the calling thread releases for what it acquires next, so that an operation whose next
// part needs no more than the last one cannot find the memory taken in between. What is left goes
// back to the pools at the end, or when a pool has no more.
//
// Threads: made and destroyed by one thread, which has one at a time.
class StagingHold {
 public:
  StagingHold();
  ~StagingHold();
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;

 private:
  friend class StagingBuffer;
  friend class StagingPool;
  // The calling thread's; null if it has none.
  static StagingHold*& current() noexcept;

  // False if it holds too many already.
  bool keep(StagingBuffer& released) noexcept;
  // The smallest block of `pool` with room for `bytes`; none: empty.
  StagingBuffer take(const StagingPool& pool, size_t bytes) noexcept;
  void give_back() noexcept;

  std::array<StagingBuffer, kHeldStagingBlocks> held_;
};

struct StagingStats {
  uint64_t budget_bytes = 0;
  uint64_t reserved_bytes = 0;  // taken from the heap: handed out or kept
  uint64_t kept_bytes = 0;      // of reserved_bytes: released and kept for reuse
  uint64_t overflow_bytes = 0;  // in use past the budget, in ordinary memory
  uint64_t overflows = 0;       // requests past the budget since the pool was made
};

class StagingPool : public std::enable_shared_from_this<StagingPool> {
 public:
  // The budget bounds reserved_bytes; 0 hands out nothing but overflow.
  static std::shared_ptr<StagingPool> make(std::shared_ptr<Heap> heap, uint64_t budget_bytes);
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Returns at least `bytes` bytes (0 counts as 1), aligned to 64 bytes, or to a page from a page
  // up, with whatever content. Throws Error(kExhausted) as said above, and when the heap does.
  StagingBuffer acquire(size_t bytes);

  // Returns the kept blocks to the heap.
  void trim() noexcept;

  // In a forked child all is zero but the budget.
  StagingStats stats() const;

 private:
  friend class StagingBuffer;

  // A released block holds the link to the next one in its own first bytes.
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
  void* take_kept(size_t capacity) noexcept;
  void* take_new(size_t capacity);
  StagingBuffer overflow(size_t bytes);
  void release(void* block, size_t capacity, bool overflow) noexcept;

  const std::shared_ptr<Heap> heap_;
  const ForkGuard fork_;
  const uint64_t budget_bytes_;
  Heap overflow_heap_{Policy::kDdr};
  std::atomic<uint64_t> reserved_bytes_{0};
  std::mutex trim_mutex_;  // one trim at a time, so that none misses what another is giving back;
                           // taken before a shelf's mutex
  std::array<Shelf, kClasses> shelves_;
};

// The pool of this process with this policy and budget, shared by all groups; made on first use and
// never destroyed. Throws Error(kUnavailable) in a process forked from one that used it, and as
// Heap.
std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes);

}  // namespace hbm::memory
