#include "memory/staging.h"

#include <algorithm>
#include <bit>
#include <map>
#include <new>
#include <string>

#include "base/error.h"

namespace hbm::memory {
namespace {

struct ProcessPools {
  const ForkGuard fork;
  std::mutex mutex;  // guards the map
  std::map<std::pair<Policy, uint64_t>, std::shared_ptr<StagingPool>> pools;
};

// Never destroyed, because late messages may outlive static objects.
ProcessPools& process_pools() {
  static auto* const all = new ProcessPools;
  return *all;
}

// Returns the bytes that a request takes: its size class, or exactly `bytes` beyond the largest.
size_t capacity_for(size_t bytes) noexcept {
  if (bytes > kLargestStagingClassBytes) return bytes;
  return std::bit_ceil(std::max(bytes, kLeastStagingClassBytes));
}

}  // namespace

StagingBuffer::~StagingBuffer() {
  if (block_ == nullptr) return;
  StagingHold* const hold = StagingHold::current();
  if (hold != nullptr && hold->keep(*this)) return;
  pool_->release(block_, capacity_, overflow_);
}

void StagingBuffer::swap(StagingBuffer& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(block_, other.block_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  std::swap(overflow_, other.overflow_);
}

StagingHold::StagingHold() { current() = this; }

StagingHold::~StagingHold() {
  release();
  current() = nullptr;
}

StagingHold*& StagingHold::current() noexcept {
  static thread_local StagingHold* hold = nullptr;
  return hold;
}

bool StagingHold::keep(StagingBuffer& released) noexcept {
  const auto free = std::ranges::find_if(held_, [](const StagingBuffer& each) { return !each; });
  if (free == held_.end()) return false;
  free->swap(released);
  return true;
}

StagingBuffer StagingHold::take(const StagingPool& pool, size_t bytes) noexcept {
  StagingBuffer* best = nullptr;
  for (StagingBuffer& each : held_) {
    const bool fits = each && each.pool_.get() == &pool && each.capacity_ >= bytes;
    if (fits && (best == nullptr || each.capacity_ < best->capacity_)) best = &each;
  }
  if (best == nullptr) return {};
  best->size_ = bytes;
  return std::move(*best);
}

std::shared_ptr<StagingPool> StagingPool::make(std::shared_ptr<Heap> heap, uint64_t budget_bytes) {
  return std::shared_ptr<StagingPool>(new StagingPool(std::move(heap), budget_bytes));
}

StagingPool::StagingPool(std::shared_ptr<Heap> heap, uint64_t budget_bytes)
    : heap_(std::move(heap)), budget_bytes_(budget_bytes) {}

StagingPool::~StagingPool() { trim(); }

void StagingHold::release() noexcept {
  current() = nullptr;
  held_ = {};
  current() = this;
}

StagingBuffer StagingPool::acquire(size_t bytes) {
  StagingBuffer taken = acquire_within_budget(bytes);
  if (taken) return taken;
  if (overflows()) return overflow(bytes);
  throw Error(ErrorKind::kExhausted,
              "cannot take " + std::to_string(bytes) + " bytes of staging memory: " +
                  std::to_string(reserved_bytes_.load(std::memory_order_relaxed)) + " of " +
                  std::to_string(budget_bytes_) + " bytes are in use, and memory policy \"" +
                  policy_name(heap_->policy()) +
                  "\" allows no other; raise staging_bytes (HBMCOMM_STAGING_BYTES), or use "
                  "\"preferred\"");
}

StagingBuffer StagingPool::acquire_within_budget(size_t bytes) {
  fork_.require_owner("take staging memory from its parent's pool");
  StagingHold* const hold = StagingHold::current();
  if (hold != nullptr) {
    StagingBuffer held = hold->take(*this, bytes);
    if (held) return held;
  }
  const size_t capacity = capacity_for(bytes);
  void* block = take_cached(capacity);
  if (block == nullptr) block = take_new(capacity);
  if (block == nullptr && hold != nullptr) {
    hold->release();
    block = take_new(capacity);
  }
  if (block == nullptr) return {};
  return StagingBuffer(shared_from_this(), block, bytes, capacity, /*overflow=*/false);
}

void StagingPool::trim() noexcept {
  if (fork_.in_child()) return;
  std::lock_guard trim_lock(trim_mutex_);
  for (size_t i = 0; i < kClasses; ++i) {
    Shelf& shelf = shelves_[i];
    Link* first;
    {
      std::lock_guard lock(shelf.mutex);
      first = std::exchange(shelf.first, nullptr);
      shelf.count = 0;
    }
    while (first != nullptr) {
      Link* const next = first->next;
      heap_->free(first);
      unreserve(kLeastStagingClassBytes << i);
      first = next;
    }
  }
}

StagingStats StagingPool::stats() const {
  StagingStats stats{.budget_bytes = budget_bytes_};
  if (fork_.in_child()) return stats;
  stats.reserved_bytes = reserved_bytes_.load(std::memory_order_relaxed);
  for (size_t i = 0; i < kClasses; ++i) {
    std::lock_guard lock(shelves_[i].mutex);
    stats.cached_bytes += shelves_[i].count * (kLeastStagingClassBytes << i);
  }
  const Usage past = overflow_heap_.stats();
  stats.overflow_bytes = past.in_use_bytes;
  stats.overflows = past.allocations;
  return stats;
}

StagingPool::Shelf& StagingPool::shelf_for(size_t capacity) noexcept {
  return shelves_[std::countr_zero(capacity) - std::countr_zero(kLeastStagingClassBytes)];
}

bool StagingPool::reserve(size_t capacity) noexcept {
  uint64_t reserved = reserved_bytes_.load(std::memory_order_relaxed);
  do {
    if (reserved > budget_bytes_ || capacity > budget_bytes_ - reserved) return false;
  } while (!reserved_bytes_.compare_exchange_weak(reserved, reserved + capacity,
                                                  std::memory_order_relaxed));
  return true;
}

void StagingPool::unreserve(size_t capacity) noexcept {
  reserved_bytes_.fetch_sub(capacity, std::memory_order_relaxed);
}

// Returns null if no block of this size is cached.
void* StagingPool::take_cached(size_t capacity) noexcept {
  if (capacity > kLargestStagingClassBytes) return nullptr;
  Shelf& shelf = shelf_for(capacity);
  std::lock_guard lock(shelf.mutex);
  Link* const block = shelf.first;
  if (block == nullptr) return nullptr;
  shelf.first = block->next;
  shelf.count -= 1;
  return block;
}

// Returns null if the budget is too small, even after trim().
void* StagingPool::take_new(size_t capacity) {
  if (!reserve(capacity)) {
    if (capacity > budget_bytes_) return nullptr;
    trim();
    if (!reserve(capacity)) return nullptr;
  }
  try {
    return heap_->allocate(capacity);
  } catch (...) {
    unreserve(capacity);
    throw;
  }
}

bool StagingPool::overflows() const noexcept {
  const Policy policy = heap_->policy();
  return policy != Policy::kBind && policy != Policy::kInterleave;
}

StagingBuffer StagingPool::overflow(size_t bytes) {
  return StagingBuffer(shared_from_this(), overflow_heap_.allocate(bytes), bytes, bytes,
                       /*overflow=*/true);
}

void StagingPool::release(void* block, size_t capacity, bool overflow) noexcept {
  if (fork_.in_child()) return;
  if (overflow) {
    overflow_heap_.free(block);
    return;
  }
  if (capacity > kLargestStagingClassBytes) {
    heap_->free(block);
    unreserve(capacity);
    return;
  }
  Shelf& shelf = shelf_for(capacity);
  std::lock_guard lock(shelf.mutex);
  shelf.first = new (block) Link{shelf.first};
  shelf.count += 1;
}

std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes) {
  process_pools().fork.require_owner("use its parent's staging pool");
  const std::lock_guard lock(process_pools().mutex);
  auto& pool = process_pools().pools[{policy, budget_bytes}];
  if (!pool) pool = StagingPool::make(std::make_shared<Heap>(policy), budget_bytes);
  return pool;
}

}  // namespace hbm::memory
