// How the operations of several nodes are cut: how many leaders a node has in one, and the blocks
// that its pipeline goes by. The same on all ranks, for it depends on sizes and on the layout
// alone. docs/design/hierarchical.md has the reasons.
#pragma once

#include <algorithm>
#include <cstddef>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/mpi/tuning.h"
#include "communicator/pieces.h"

namespace hbm::hierarchical {

// How fine an operation is cut.
struct Grain {
  size_t blocks;               // as many at least, if messages are not too small then
  size_t least_message_bytes;  // a leader sends to another in a block
};
inline constexpr Grain kCoarse{kCoarseBlocks, kCoarseMessageBytes};
// For links that wait for what another link has carried.
inline constexpr Grain kFine{kFineBlocks, kFineMessageBytes};
inline constexpr Grain kOfChain{kChainBlocks, kChainMessageBytes};

// `bytes`: of all that the operation moves.
inline size_t leaders_of(const NodeLayout& layout, size_t bytes) {
  return bytes <= kOneLeaderBytes ? 1 : layout.leaders;
}

struct BlockCut {
  size_t block = 1;  // elements of each stream
  size_t blocks = 1;

  ElementRange range(size_t count, size_t index) const {
    const size_t offset = std::min(index * block, count);
    return {offset, std::min(block, count - offset)};
  }
};

// Cuts streams of at most `longest` elements. In a block, a message between two leaders has a part
// of each of `streams`, and the parts of `shares` messages make up a stream's block.
inline BlockCut cut(const NodeLayout& layout, size_t longest, size_t element, size_t streams,
                    size_t shares, Grain grain = kCoarse) {
  // With kLanes blocks on the link, each of one message a peer, an operation takes no more memory
  // than one of two blocks of whole chunks (mpi/channel.h).
  const size_t most = std::min(kLongestBlockMessageBytes, layout.chunk_bytes * 2 / mpi::kLanes);
  const size_t message = longest * element * streams / (shares * grain.blocks);
  const size_t bytes = std::clamp(message, std::min(grain.least_message_bytes, most), most);
  const size_t block = std::max<size_t>(1, bytes / (element * streams)) * shares;
  return {block, std::max<size_t>(1, (longest + block - 1) / block)};
}

}  // namespace hbm::hierarchical
