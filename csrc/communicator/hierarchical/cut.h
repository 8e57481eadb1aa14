// Decides how many leaders of each node take part in an operation over several nodes, and how the
// data is cut into the blocks of the pipeline. The result is the same on all ranks, because it
// depends only on sizes and on the layout. docs/design/hierarchical.md has the reasons.
//
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/scatter_gather.h"

namespace hbm::communicator::hierarchical {

// The granularity of a cut.
struct Grain {
  // An operation has at least this many blocks, unless its messages would then be shorter than
  // least_message_bytes.
  size_t blocks;
  // The least bytes of a message between two leaders in a block.
  size_t least_message_bytes;
};
inline constexpr Grain kCoarse{kCoarseBlocks, kCoarseMessageBytes};
// For operations in which a link waits for data from another link.
inline constexpr Grain kFine{kFineBlocks, kFineMessageBytes};
inline constexpr Grain kOfChain{kChainBlocks, kChainMessageBytes};

// Returns the number of leaders of each node in an operation that moves `bytes` in total.
inline size_t leaders_of(const NodeLayout& layout, size_t bytes) {
  return bytes <= kOneLeaderBytes ? 1 : layout.leaders;
}

struct BlockCut {
  size_t block = 1;  // elements of each transfer in a block
  size_t blocks = 1;

  ElementRange range(size_t count, size_t index) const {
    const size_t offset = std::min(index * block, count);
    return {offset, std::min(block, count - offset)};
  }
};

// Cuts transfers of at most `longest` elements into blocks. `transfers`: the number of transfers
// that have a part in each message between two leaders. `shares`: the number of messages into which
// a block of one transfer is divided.
inline BlockCut cut(const NodeLayout& layout, size_t longest, size_t element, size_t transfers,
                    size_t shares, Grain grain = kCoarse) {
  // mpi::chunk_bytes() leaves room for kLeastInFlight blocks of whole chunks.
  const size_t most = std::min(kLongestBlockMessageBytes, layout.chunk_bytes);
  const size_t message = longest * element * transfers / (shares * grain.blocks);
  const size_t bytes = std::clamp(message, std::min(grain.least_message_bytes, most), most);
  const size_t block = std::max<size_t>(1, bytes / (element * transfers)) * shares;
  return {block, std::max<size_t>(1, (longest + block - 1) / block)};
}

}  // namespace hbm::communicator::hierarchical
