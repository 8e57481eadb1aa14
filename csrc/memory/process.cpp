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
  std::map<Policy, std::shared_ptr<SharedSegment>> segments;
  std::map<std::pair<Policy, uint64_t>, std::shared_ptr<StagingPool>> pools;
};

Shared& shared() {
  static auto* const all = new Shared;
  return *all;
}

template <typename Stats, typename Owner>
std::map<Policy, Stats> stats_of(const std::map<Policy, std::shared_ptr<Owner>>& owners) {
  std::map<Policy, Stats> stats;
  if (shared().fork.in_child()) return stats;
  const std::lock_guard lock(shared().mutex);
  for (const auto& [policy, owner] : owners) stats.emplace(policy, owner->stats());
  return stats;
}

}  // namespace

std::shared_ptr<Heap> process_heap(Policy policy) {
  shared().fork.require_owner("allocate from its parent's heap");
  const std::lock_guard lock(shared().mutex);
  auto& heaps = shared().heaps;
  const auto found = heaps.find(policy);
  if (found != heaps.end()) return found->second;
  return heaps.emplace(policy, std::make_shared<Heap>(policy, /*budget_bytes=*/0)).first->second;
}

std::shared_ptr<SharedSegment> process_segment(Policy policy) {
  shared().fork.require_owner("allocate from its parent's segment");
  const std::lock_guard lock(shared().mutex);
  auto& segments = shared().segments;
  const auto found = segments.find(policy);
  if (found != segments.end()) return found->second;
  return segments.emplace(policy, SharedSegment::create(policy, /*size_bytes=*/0)).first->second;
}

std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes) {
  shared().fork.require_owner("use its parent's staging pool");
  const std::lock_guard lock(shared().mutex);
  auto& pools = shared().pools;
  const std::pair key(policy, budget_bytes);
  const auto found = pools.find(key);
  if (found != pools.end()) return found->second;
  auto heap = std::make_shared<Heap>(policy, budget_bytes);
  return pools.emplace(key, StagingPool::make(std::move(heap), budget_bytes)).first->second;
}

std::map<Policy, HeapStats> process_heap_stats() { return stats_of<HeapStats>(shared().heaps); }

std::map<Policy, SharedSegmentStats> process_segment_stats() {
  return stats_of<SharedSegmentStats>(shared().segments);
}

}  // namespace hbm::memory
