// An operation bound to its memory: how it is cut up, carried out, and rolled back.
//
// Threads: run_lane() may be called from any thread, for each lane once; roll_back() when no lane
// is running.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "box/server/storage/operation_record.h"
#include "box/server/storage/records.h"
#include "box/server/storage/tuning.h"

namespace hbm::box {

// How an operation on a range of a segment is cut up. The segment's offsets are divided into chunks
// of a fixed size; each step is the part of the range that lies in one chunk; and lanes are equal
// runs of steps, which can be carried out side by side.
struct Steps {
  uint64_t offset;  // of the range in its segment
  uint64_t bytes;
  uint64_t chunk;  // bytes

  struct Bounds {
    uint64_t first;
    uint64_t last;  // one past
  };

  // REQUIRES: bytes > 0.
  uint64_t count() const noexcept { return (offset + bytes - 1) / chunk - offset / chunk + 1; }

  uint64_t chunk_of(uint64_t step) const noexcept { return offset / chunk + step; }

  // The bytes of the segment that a step covers.
  Bounds bytes_of(uint64_t step) const noexcept {
    const uint64_t start = chunk_of(step) * chunk;
    return {std::max(start, offset), std::min(start + chunk, offset + bytes)};
  }

  // The steps of a lane.
  Bounds steps_of(uint64_t lane, uint64_t lanes) const noexcept {
    return {count() * lane / lanes, count() * (lane + 1) / lanes};
  }
};

// Locks for the chunks of all segments: a fixed number of mutexes, of which each chunk has one.
class Stripes {
 public:
  // Threads: any. Two chunks may share a mutex, so a thread must hold one at a time.
  std::mutex& of(const void* segment, uint64_t chunk) noexcept {
    // Neighbouring chunks have different mutexes; the multiplier spreads segments.
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
  const std::byte* source;  // kAccumulate
  uint32_t chunk;           // bytes
  bool sync;

  Steps steps() const noexcept { return {what.target.offset, what.bytes, chunk}; }
};

// Carries out the rest of a lane, each step under its chunk's lock. Progress, and what the target
// was, go to `recorded`, unless it is null.
// Throws Error(kUnavailable) when, under `sync`, the disk fails.
void run_lane(const BoundOperation& operation, uint32_t lane, const Recorded& recorded,
              Stripes& stripes);

// Puts back every step that was under way.
void roll_back(const BoundOperation& operation, const Recorded& recorded);

// Returns the value that the cell of a completed kFetchAdd had before.
int64_t cell_before(const Recorded& recorded);

}  // namespace hbm::box
