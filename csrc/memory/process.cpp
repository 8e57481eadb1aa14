#include "memory/process.h"

#include <mutex>
#include <utility>

#include "base/fork.h"

namespace hbm::memory {
namespace {

struct Shared {
  const ForkGuard fork;
  std::mutex mutex;  // guards the maps
  std::map<Policy, std::shared_ptr<Heap>> heaps;
  std::map<std::pair<Policy, uint64_t>, std::shared_ptr<StagingPool>> pools;
};

Shared& shared() {
  static auto* const all = new Shared;
  return *all;
}

}  // namespace

std::shared_ptr<Heap> process_heap(Policy policy) {
  shared().fork.require_owner("allocate from its parent's heap");
  const std::lock_guard lock(shared().mutex);
  auto& heap = shared().heaps[policy];
  if (heap == nullptr) heap = std::make_shared<Heap>(policy, /*budget_bytes=*/0);
  return heap;
}

std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes) {
  shared().fork.require_owner("use its parent's staging pool");
  const std::lock_guard lock(shared().mutex);
  auto& pool = shared().pools[{policy, budget_bytes}];
  if (pool == nullptr) {
    pool = StagingPool::make(std::make_shared<Heap>(policy, budget_bytes), budget_bytes);
  }
  return pool;
}

std::map<Policy, HeapStats> process_heap_stats() {
  std::map<Policy, HeapStats> stats;
  if (shared().fork.in_child()) return stats;
  const std::lock_guard lock(shared().mutex);
  for (const auto& [policy, heap] : shared().heaps) stats.emplace(policy, heap->stats());
  return stats;
}

}  // namespace hbm::memory
