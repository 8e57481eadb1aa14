// The chunks of a large collective on tensors of an accelerator: while one is reduced, the next is
// on its way to the host and the last one on its way back.
//
// Every rank must cut alike, so the cut depends on nothing but what all ranks have in common: the
// lengths, the type and HBMCOMM_DEVICE_CHUNK_BYTES.
//
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "communicator/communicator.h"
#include "process_group/tuning.h"

namespace hbm {

// The streams of a collective that are equally long on every rank: the tensor of an all_reduce, the
// parts of all ranks in an all_gather.
struct EqualStreams {
  size_t count = 0;  // elements of each; 0: they may differ, and the collective goes in one go
  size_t number = 1;
};

class Chunks {
 public:
  // One chunk of everything.
  Chunks() = default;

  // Chunks of `chunk_bytes` (of all streams together) to half as many more, and of several times
  // that from 16 streams on; one below two of those.
  Chunks(const EqualStreams& streams, size_t element, size_t chunk_bytes) : count_(streams.count) {
    constexpr size_t kLine = 64;
    const size_t bytes = streams.count * streams.number * element;
    chunk_bytes *= std::max<size_t>(1, streams.number / kStreamsPerDeviceChunk);  // a copy for each
    if (bytes < 2 * chunk_bytes) return;
    const size_t wanted = bytes / chunk_bytes;
    const size_t line = std::max<size_t>(1, kLine / element);
    chunk_ = ((count_ + wanted - 1) / wanted + line - 1) / line * line;
    number_ = (count_ + chunk_ - 1) / chunk_;
  }

  size_t number() const { return number_; }

  // The part of each stream in a chunk; kAllElements where there is one chunk.
  ElementRange range(size_t index) const {
    if (number_ == 1) return kAllElements;
    const size_t offset = index * chunk_;
    return {offset, std::min(chunk_, count_ - offset)};
  }

  // The parts, in a chunk, of a buffer of `elements`. REQUIRES: it holds whole streams, one after
  // the other.
  std::vector<ElementRange> pieces(size_t elements, size_t index) const {
    if (number_ == 1) return {{0, elements}};
    const ElementRange part = range(index);
    std::vector<ElementRange> found;
    for (size_t start = 0; start < elements; start += count_) {
      found.push_back({start + part.offset, part.count});
    }
    return found;
  }

  // The number under which a chunk's operations go, with the length of the whole if there are
  // several.
  OperationNumber sequence(uint64_t number) const {
    return {number, number_ == 1 ? 0 : static_cast<uint64_t>(count_)};
  }

 private:
  size_t count_ = 0;  // elements of a stream
  size_t chunk_ = 0;  // of these, in each chunk but the last
  size_t number_ = 1;
};

}  // namespace hbm
