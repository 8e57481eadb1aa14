// Thresholds of memory: segments, heaps, pools, staging, and the room that the machine has for
// them.
// Measure: `segment_test`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::memory {

// -- The default size of a shared segment: addresses, not memory

// The default size of a segment. It is larger than the memory, because a heap has holes.
// Unit: times the memory of the machine
// Below: a smaller value runs out of addresses in a fragmented heap with memory left.
// Above: a larger value takes more of the process' address space.
// Measure: `segment_test --gtest_filter=SharedSegment.NamesLimitsAndFitsTheDefaultToThem`
inline constexpr uint64_t kSegmentAddressesPerMemory = 4;

// The largest default size of a segment, unless the machine has more memory.
// Unit: bytes
// Below: the segment has kSegmentAddressesPerMemory times the memory of the machine.
// Above: the segment has the value, or the memory of the machine if that is more.
// Measure: `segment_test --gtest_filter=SharedSegment.NamesLimitsAndFitsTheDefaultToThem`
inline constexpr uint64_t kLargestSpareSegmentBytes = uint64_t{1} << 40;

// The divisor of RLIMIT_AS; the quotient is the most that a segment takes by default. A segment may
// not take all addresses, because the segments of the other ranks need addresses too.
// Unit: parts of RLIMIT_AS
// Below: a smaller value leaves less for the segments of other ranks.
// Above: a larger value makes the segment smaller than the limit requires.
// Measure: `segment_test --gtest_filter=SharedSegment.LittleAddressSpaceMakesTheDefaultSmaller`
inline constexpr uint64_t kAddressLimitDivisor = 8;

// The least default size, whatever RLIMIT_AS is. If the kernel refuses a default size, a segment of
// half the size is tried.
// Unit: bytes
// Below: under twice the value, a refused size is not halved, and the error names the limits.
// Above: from twice the value on, a refused size is halved.
// Measure: `segment_test --gtest_filter=SharedSegment.LittleAddressSpaceMakesTheDefaultSmaller`
inline constexpr uint64_t kLeastDefaultSegmentBytes = uint64_t{256} << 20;

// The least default size under RLIMIT_FSIZE, which the kernel applies to segments.
// Unit: bytes
// Below: under a lower limit, making the segment fails, and the error names the limit.
// Above: under a limit of up to kLeastDefaultSegmentBytes, the segment may have the limit's size.
// Measure: `segment_test --gtest_filter=SharedSegment.NamesLimitsAndFitsTheDefaultToThem`
inline constexpr uint64_t kLeastLimitedSegmentBytes = uint64_t{1} << 20;

// -- Blocks of a segment

// The least block of a segment whose pages return to the kernel when it is freed.
// Unit: bytes
// Below: the pages stay with the segment, for the next block.
// Above: from the value on, the kernel has the pages again before free() returns.
// Measure: `segment_test --gtest_filter=SharedSegment.ReleasesThePagesOfLargeBlocks`
inline constexpr size_t kReturnedBlockBytes = size_t{1} << 20;

// The largest reserved arena at the start of a segment, for the control regions of groups. An arena
// is made of whole huge pages.
// Unit: bytes
// Below: kReservedArenaDivisor decides the size of the arena.
// Above: the arena has the value.
// Measure: `segment_test --gtest_filter=SharedSegment.*Front*`
inline constexpr uint64_t kLargestReservedArenaBytes = uint64_t{64} << 20;

// The divisor of a segment's size; the quotient is the most that its reserved arena takes.
// Unit: parts of the segment
// Below: a smaller value leaves less of a small segment for its heap.
// Above: a larger value makes the control regions of groups use the heap, which loads memkind.
// Measure: `segment_test --gtest_filter=SharedSegment.*Front*`
inline constexpr uint64_t kReservedArenaDivisor = 8;

// -- Heaps

// The least block of a heap with a mapping of its own. For blocks of this size memkind has no
// advantage: memkind would keep none of these blocks after free(), and would round up their sizes.
// Unit: bytes
// Below: memkind allocates the block.
// Above: from the value on, the block has a mapping of its own with no more pages than it needs, on
// the nodes of its policy.
// Measure: `heap_test --gtest_filter=Heap.LargeBlocksAreMappedAtExactlyTheirPages`
inline constexpr size_t kMappedBlockBytes = size_t{8} << 20;

// The bytes of a block that are touched before the room on its nodes is read again, under kBind and
// kInterleave. Each of several processes that touch blocks at the same time may exceed the room by
// such a step, and then uses some of the margin (kFreeMarginBytes).
// Unit: bytes
// Below: a smaller value reads the room more often.
// Above: a larger value lets concurrent processes overrun the margin further.
// Measure: `shortage_test --gtest_filter=Heap.ThrowsIfANodeFillsUp`
inline constexpr size_t kCommitStepBytes = size_t{16} << 20;

// The number of pages in one call of move_pages or mincore that asks where memory is.
// Unit: pages
// Below: a smaller value makes more system calls.
// Above: a larger value takes more of the stack.
// Measure: `placement_test`
inline constexpr size_t kPagesPerQuery = 1024;

// The bandwidth from which a node counts as high-bandwidth memory, unless MEMKIND_HBW_THRESHOLD
// names another. memkind has the same default.
// Unit: MiB/s
// Below: the node is ordinary memory.
// Above: from the value on, the node is high-bandwidth memory.
// Measure: `topology_test`
inline constexpr uint64_t kLeastHbmBandwidth = 200 * 1024;

// -- The room of the machine and its nodes

// The free memory of a node, the machine or a control group that no block may take. The part that
// kFreeMarginDivisor gives is added to this margin.
// Unit: bytes
// Below: if no more than the margin is free, there is no room.
// Above: the free memory beyond the margin is room.
// Measure: `shortage_test`
inline constexpr uint64_t kFreeMarginBytes = uint64_t{32} << 20;

// The divisor of all memory of the node, machine or control group; the quotient is added to
// kFreeMarginBytes.
// Unit: parts of the memory
// Below: a smaller value refuses more blocks that would fit.
// Above: a larger value risks that the kernel kills the process.
// Measure: `shortage_test`
inline constexpr uint64_t kFreeMarginDivisor = 128;

// The divisor of the room that was last read. Small blocks may take the quotient, but at most
// kLargestUncheckedBytes, before the room is read again.
// Unit: parts of the room
// Below: a smaller value lets processes that allocate together overrun the room further.
// Above: a larger value reads the room for more blocks.
// Measure: `room_test --gtest_filter=Room.SmallRequestsShareOneQuery`
inline constexpr uint64_t kUncheckedRoomDivisor = 64;

// The most bytes that small blocks may take between two readings of the room.
// Unit: bytes
// Below: up to and including the value, the last reading is used, less the bytes granted since.
// Above: the room is read for the block.
// Measure: `room_test --gtest_filter=Room.SmallRequestsShareOneQuery`
inline constexpr uint64_t kLargestUncheckedBytes = uint64_t{16} << 20;

// The age from which a reading of the room is not used again.
// Below: small blocks use the reading.
// Above: from the value on, the room is read for the next block.
// Measure: `room_test --gtest_filter=Room.SmallRequestsShareOneQuery`
inline constexpr std::chrono::milliseconds kRoomReadingLifetime{100};

// -- Staging memory

// The least size class of staging memory.
// Unit: bytes
// Below: a smaller request gets a block of the value.
// Above: up to kLargestStagingClassBytes, a request is rounded up to a power of two.
// Measure: `staging_test --gtest_filter=Staging.ReusesBlocksWithoutTheHeap`
inline constexpr size_t kLeastStagingClassBytes = 64;

// The largest size class of staging memory.
// Unit: bytes
// Below: up to and including the value, a released block is cached for the next request of its
// class.
// Above: a block has exactly the size of the request, and returns to the heap when it is released.
// Measure: `staging_test --gtest_filter=Staging.LargeBlocksGoBackToTheHeap`
inline constexpr size_t kLargestStagingClassBytes = size_t{16} << 20;

// The most released blocks that a thread keeps for the next part of its operation. The value is
// twice the largest number of blocks that one operation uses.
// Unit: blocks
// Below: the thread keeps the block.
// Above: from the value on, the block returns to its pool.
// Measure: `staging_test --gtest_filter=Staging.HoldKeepsReleasedBlocks`
inline constexpr size_t kHeldStagingBlocks = 8;

// -- Pools

// The least range of addresses of a block in a pool, unless the pool's options set another. It is a
// power of two.
// Unit: bytes
// Below: a smaller block takes the value in addresses, and memory by pages.
// Above: a block takes the next power of two in addresses.
// Measure: `pool_test --gtest_filter=Pool.EndsAreConfigurable`
inline constexpr uint64_t kLeastPoolBlockBytes = uint64_t{4} << 10;

// The largest block of a pool, unless the pool's options set another.
// Unit: bytes
// Below: up to and including the value, the pool makes the block if it has the memory.
// Above: the pool refuses the block.
// Measure: `pool_test --gtest_filter=Pool.EndsAreConfigurable`
inline constexpr uint64_t kLargestPoolBlockBytes = uint64_t{32} << 30;

// The addresses of a pool. A pool has more addresses than memory, because a block takes a range of
// addresses whose size is a power of two, and memory only for its pages.
// Unit: times the capacity
// Below: a smaller value runs out of ranges with memory left.
// Above: a larger value takes more of the process' address space.
// Measure: `pool_test --gtest_filter=Pool.CapacityCountsPagesAndNotRanges`
inline constexpr uint64_t kPoolAddressesPerCapacity = 4;

// The largest capacity of a pool, so that its addresses are countable in 64 bits.
// Unit: bytes
// Below: up to and including the value, the pool is made, if enough addresses are left.
// Above: the pool is refused.
// Measure: `pool_test --gtest_filter=Pool.InvalidPoolSizesAreErrors`
inline constexpr uint64_t kLargestPoolCapacityBytes = uint64_t{1} << 60;

}  // namespace hbm::memory
