// Thresholds by which a group's ranks agree on the chunk of the slots in shared memory.
// Measure: `oversubscription_test
// --gtest_filter=ShmSlotChunk.IsLargerIfOversubscribedAndRoomIsLeft`

#pragma once

#include <cstddef>

namespace hbm::communicator::connect {

// The chunk of a slot if each rank has a processor. The slots of a few ranks stay in the cache.
// Unit: bytes
// Below: a smaller value takes more phases for a large tensor.
// Above: with a larger value the slots no longer fit the processor's cache.
// Measure: `python -m benchmarks.collectives --contenders hbm-c-staged`
inline constexpr size_t kSlotChunkBytes = 128 << 10;

// The chunk of a slot if the ranks are oversubscribed.
// Unit: bytes
// Below: a smaller value takes more phases, and each phase lasts until every rank has run on a
// processor.
// Above: a larger value takes more memory, and the slots no longer fit the processor's cache.
// Measure: `hbmcomm bench collectives --ranks 8 --contenders hbm-staged`
inline constexpr size_t kOversubscribedSlotChunkBytes = 1 << 20;

// The least chunk of a slot.
// Unit: bytes
// Below: the chunk is not halved further, even if the slots take more than half of staging_bytes or
// an eighth of the segment.
// Above: the chunk is halved while the slots take more than half of staging_bytes or an eighth of
// the segment.
inline constexpr size_t kLeastSlotChunkBytes = 4 << 10;

}  // namespace hbm::communicator::connect
