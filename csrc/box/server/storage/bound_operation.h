// An operation, and the memory that it is about: how its lanes are carried out, and put back.
//
// Threads: run_lane() may be called from any thread, for each lane once; roll_back() when no lane
// is running.
#pragma once

#include <cstddef>
#include <cstdint>

#include "box/server/storage/operation_record.h"
#include "box/server/storage/records.h"
#include "box/server/storage/steps.h"
#include "box/server/storage/stripes.h"

namespace hbm::box {

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
void run_lane(const BoundOperation& work, uint32_t lane, const Recorded& recorded,
              Stripes& stripes);

// Puts back every step that was under way.
void roll_back(const BoundOperation& work, const Recorded& recorded);

// What the cell of a kFetchAdd that has been carried out held before.
int64_t cell_before(const Recorded& recorded);

}  // namespace hbm::box
