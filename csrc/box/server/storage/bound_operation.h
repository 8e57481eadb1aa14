// An operation with pointers to the memory of its segments. The functions divide the operation into
// steps, execute it, and roll it back.
//
// Threads: any thread may call run_part(), once for each part. roll_back() may run only when no
// part is running.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "box/server/storage/operation_record.h"
#include "box/server/storage/records.h"
#include "box/server/storage/tuning.h"

namespace hbm::box::server::storage {

// The division of an operation on a range of a segment. A segment is divided into chunks of a fixed
// size. A step covers the bytes of the range that are in one chunk. A part is a sequence of
// adjacent steps; the parts of an operation can be executed concurrently. Two parts differ by at
// most one step in length.
struct Steps {
  uint64_t offset;  // of the range in the segment
  uint64_t bytes;
  uint64_t chunk;  // bytes

  struct Bounds {
    uint64_t first;
    uint64_t last;  // exclusive
  };

  // REQUIRES: bytes > 0.
  uint64_t count() const noexcept { return (offset + bytes - 1) / chunk - offset / chunk + 1; }

  uint64_t chunk_of(uint64_t step) const noexcept { return offset / chunk + step; }

  // Returns the bytes of the segment that a step covers.
  Bounds bytes_of(uint64_t step) const noexcept {
    const uint64_t start = chunk_of(step) * chunk;
    return {std::max(start, offset), std::min(start + chunk, offset + bytes)};
  }

  // Returns the steps of a part.
  Bounds steps_of(uint64_t part, uint64_t parts) const noexcept {
    return {count() * part / parts, count() * (part + 1) / parts};
  }
};

// Locks for the chunks of all segments: a fixed number of mutexes, which the chunks share.
class Stripes {
 public:
  // Threads: any. Two chunks may share a mutex, so a thread must hold at most one.
  std::mutex& of(const void* segment, uint64_t chunk) noexcept {
    // Adjacent chunks have different mutexes; the multiplier spreads the segments over the mutexes.
    const uint64_t start = reinterpret_cast<uintptr_t>(segment) * 0x9E3779B97F4A7C15u >> 32;
    return stripes_[(start + chunk) % stripes_.size()].mutex;
  }

 private:
  struct alignas(64) Stripe {
    std::mutex mutex;
  };
  std::array<Stripe, kChunkLocks> stripes_;
};

struct BoundOperation {
  const BoxOperation& what;
  std::byte* target;        // the first byte of the segment
  const std::byte* source;  // of a kAccumulate; null for a kFetchAdd
  uint32_t chunk;           // bytes
  bool sync;

  Steps steps() const noexcept { return {what.target.offset, what.bytes, chunk}; }
};

// Executes the remaining steps of a part, each under the lock of its chunk. Records the progress
// and the old data of the target in `recorded`, unless it is null. Throws Error(kUnavailable) if
// the disk fails under `sync`.
void run_part(const BoundOperation& operation, uint32_t part, const Recorded& recorded,
              Stripes& stripes);

// Restores the old data of the target for every step that has begun and not ended.
void roll_back(const BoundOperation& operation, const Recorded& recorded);

// Returns the value that the cell of a completed kFetchAdd had before the addition.
int64_t cell_before(const Recorded& recorded);

}  // namespace hbm::box::server::storage
