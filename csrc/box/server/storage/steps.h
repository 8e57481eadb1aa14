// How an operation on a range of a segment is cut up. The segment's offsets are divided into chunks
// of a fixed size; each step is the part of the range that lies in one chunk; and lanes are equal
// runs of steps, which can be carried out side by side.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hbm::box {

struct Steps {
  uint64_t offset;  // of the range in its segment
  uint64_t bytes;
  uint64_t chunk;  // bytes

  struct Range {
    uint64_t first;
    uint64_t last;  // one past
  };

  // REQUIRES: bytes > 0.
  uint64_t count() const noexcept { return (offset + bytes - 1) / chunk - offset / chunk + 1; }

  uint64_t chunk_of(uint64_t step) const noexcept { return offset / chunk + step; }

  // The bytes of the segment that a step covers.
  Range bytes_of(uint64_t step) const noexcept {
    const uint64_t start = chunk_of(step) * chunk;
    return {std::max(start, offset), std::min(start + chunk, offset + bytes)};
  }

  // The steps of a lane.
  Range steps_of(uint64_t lane, uint64_t lanes) const noexcept {
    return {count() * lane / lanes, count() * (lane + 1) / lanes};
  }
};

}  // namespace hbm::box
