// Thresholds of the box's store, on disk and in memory.
// Measure: `python -m benchmarks.box --sections store --store /tmp`

#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::box::server::storage {

// The size of a chunk, a multiple of a page. An accumulate works chunk by chunk: it takes a lock
// for each chunk, saves the chunk's old data, and records its progress.
// Unit: bytes
// Below: a smaller value records the progress more often.
// Above: a larger value saves more old data for a rollback, and makes other operations wait longer
// for the lock.
inline constexpr uint32_t kAccumulateChunkBytes = 64 << 10;

// Locks that the chunks of all segments share.
// Unit: locks
// Below: a smaller value makes accumulates of different chunks wait for one another.
// Above: a larger value takes more memory.
// Measure: `python -m benchmarks.box --sections accumulate`
inline constexpr size_t kChunkLocks = 1024;

// The number by which the catalogue's records of deleted segments (dead records) exceed its live
// segments.
// Unit: records
// Below: the catalogue grows by a record for each segment that is made or deleted.
// Above: the catalogue is written again, without dead records.
// Measure: `smb_store_test --gtest_filter=StoreTest.TheCatalogueIsCompacted`
inline constexpr uint64_t kMostDeadRecords = 1 << 16;

// The bytes of a file that are read at a time, to compute its checksum or to look for data.
// Unit: bytes
// Below: a smaller value takes more system calls.
// Above: a larger value takes more memory, in each thread.
// Measure: `smb_store_damage_test --gtest_filter=DamagedStore.ChecksumsMatchSha256sum`
inline constexpr size_t kFileReadBytes = 1 << 20;

// The threads that compute the checksums of a store's files.
// Unit: threads
// Below: there are as many threads as the machine has processors, at most one for each file.
// Above: there are as many threads as the value.
// Measure: `smb_store_damage_test --gtest_filter=DamagedStore.ChecksumsMatchSha256sum`
inline constexpr unsigned kMostChecksumThreads = 8;

// The least number of descriptors that segments leave for clients. Segments leave at most half of
// the limit of the process. A new segment that would take a descriptor left for clients is refused
// with Error(kExhausted).
// Unit: descriptors
// Below: if an eighth of the limit is less than the value, segments leave the value.
// Above: if an eighth of the limit is more than the value, segments leave that eighth.
// Measure: `smb_service_test --gtest_filter=Service.SegmentsLeaveDescriptorsForOthers`
inline constexpr uint64_t kFewestClientDescriptors = 64;

}  // namespace hbm::box::server::storage
