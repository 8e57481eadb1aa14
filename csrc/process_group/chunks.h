// The chunks of a large collective on tensors of an accelerator. While one chunk is reduced, the
// next chunk is copied to the host, and the previous one back to the device.
//
// Every rank must cut into the same chunks, so the chunks depend only on values that are equal on
// all ranks: the lengths, the type and HBMCOMM_DEVICE_CHUNK_BYTES.
//
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "communicator/communicator.h"
#include "process_group/tuning.h"

namespace hbm::process_group {

// The streams of a collective (not of a device): runs of elements that are equally long on every
// rank. An all_reduce has one stream, its tensor. An all_gather has the part of each rank.
struct EqualStreams {
  size_t count = 0;  // elements of each; 0: lengths may differ, so there is one chunk
  size_t number = 1;
};

class Chunks {
 public:
  // Makes one chunk of all elements.
  Chunks() = default;

  // Makes chunks of `chunk_bytes` to 1.5 times as much, counting all streams together. From 16
  // streams on, chunks are several times as large, because a chunk takes one copy for each stream.
  // Makes one chunk if the streams have less than two chunks' bytes.
  Chunks(const EqualStreams& streams, size_t element, size_t chunk_bytes) : count_(streams.count) {
    constexpr size_t kLine = 64;
    const size_t bytes = streams.count * streams.number * element;
    chunk_bytes *= std::max<size_t>(1, streams.number / kStreamsPerDeviceChunk);
    if (bytes < 2 * chunk_bytes) return;
    const size_t wanted = bytes / chunk_bytes;
    const size_t line = std::max<size_t>(1, kLine / element);
    chunk_ = ((count_ + wanted - 1) / wanted + line - 1) / line * line;
    number_ = (count_ + chunk_ - 1) / chunk_;
  }

  size_t number() const { return number_; }

  // Returns the part of each stream in a chunk; kAllElements if there is one chunk.
  communicator::ElementRange range(size_t index) const {
    if (number_ == 1) return communicator::kAllElements;
    const size_t offset = index * chunk_;
    return {offset, std::min(chunk_, count_ - offset)};
  }

  // Returns the parts of a buffer of `elements` that belong to a chunk. REQUIRES: the buffer holds
  // whole streams, one after the other.
  std::vector<communicator::ElementRange> parts(size_t elements, size_t index) const {
    if (number_ == 1) return {{0, elements}};
    const communicator::ElementRange part = range(index);
    std::vector<communicator::ElementRange> found;
    for (size_t start = 0; start < elements; start += count_) {
      found.push_back({start + part.offset, part.count});
    }
    return found;
  }

  // Returns the operation number that each chunk of collective `number` has. If there are several
  // chunks, the operation number includes the length of the whole stream, in which the ranks must
  // agree.
  communicator::OperationNumber sequence(uint64_t number) const {
    return {number, number_ == 1 ? 0 : static_cast<uint64_t>(count_)};
  }

 private:
  size_t count_ = 0;  // elements of a stream
  size_t chunk_ = 0;  // elements of a stream in each chunk except the last
  size_t number_ = 1;
};

}  // namespace hbm::process_group
