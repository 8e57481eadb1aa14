// The heaps, segments and staging pools of this process: one for each way of asking, shared by all
// groups.
//
// They are never destroyed, because tensors and late messages may outlive any order of destruction
// at exit. A process forked from one that used them may use neither.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "memory/heap.h"
#include "memory/segment.h"
#include "memory/staging.h"

namespace hbm::memory {

// For tensors. Unbounded: what bounds it is what the policy's nodes have free.
std::shared_ptr<Heap> process_heap(Policy policy);

// For memory that other processes of this node map. Of the default size; made on first use.
std::shared_ptr<SharedSegment> process_segment(Policy policy);

// For messages, of at most `budget_bytes`.
std::shared_ptr<StagingPool> process_staging(Policy policy, uint64_t budget_bytes);

// Of the tensor heaps that were used so far.
std::map<Policy, HeapStats> process_heap_stats();

// Of the segments that were used so far.
std::map<Policy, SharedSegmentStats> process_segment_stats();

}  // namespace hbm::memory
