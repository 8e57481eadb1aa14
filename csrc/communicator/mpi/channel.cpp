#include "communicator/mpi/channel.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "communicator/message.h"

namespace hbm::mpi {
namespace {

constexpr uint64_t kMostOfAnOperation = 16 << 20;
constexpr size_t kSmallestChunk = 4 << 10;
constexpr size_t kLargestChunk = 512 << 10;

// What the hungriest operation (TwoPhase on a rank that sends to and receives from all) takes of
// the pool, which rounds up to powers of two.
uint64_t operation_bytes(size_t chunk, uint64_t size) {
  const uint64_t slot = chunk + kHeaderBytes;
  const uint64_t first_phase = std::bit_ceil(2 * (size - 1) * slot);
  const uint64_t second_phase = std::bit_ceil(size * slot);
  return 2 * (first_phase + second_phase);
}

}  // namespace

size_t chunk_bytes(uint64_t staging_bytes, int size) {
  const auto ranks = static_cast<uint64_t>(size);
  for (size_t chunk = kLargestChunk; chunk >= kSmallestChunk; chunk /= 2) {
    const uint64_t needed = operation_bytes(chunk, ranks);
    const bool smallest = chunk == kSmallestChunk;
    if (needed <= staging_bytes && (needed <= kMostOfAnOperation || smallest)) return chunk;
  }
  throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging_bytes) +
                                       ", and a group of " + std::to_string(size) +
                                       " ranks needs at least " +
                                       std::to_string(operation_bytes(kSmallestChunk, ranks)));
}

}  // namespace hbm::mpi
