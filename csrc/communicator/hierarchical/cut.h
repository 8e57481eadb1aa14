// How the operations of several nodes are cut: how many leaders a node has in one, and the blocks
// that its pipeline goes by. The same on all ranks, for it depends on sizes and on the layout
// alone. docs/design/hierarchical.md has the reasons.
#pragma once

#include <algorithm>
#include <cstddef>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/pieces.h"

namespace hbm::hierarchical {

// Up to here a node has one leader: several would only add messages.
inline constexpr size_t kOneLeaderBytes = 64 << 10;
// The most that a leader sends to another in a block.
inline constexpr size_t kMostMessageBytes = 256 << 10;

// Up to here streams go to all nodes at once: turns would only add latencies.
inline constexpr size_t kTogetherBytes = 64 << 10;
// The longest message of an alltoall that goes by turns.
inline constexpr size_t kTurnMessageBytes = 128 << 10;
// A broadcast to several nodes goes along a chain of them from as many bytes on for each leader
// there. It has 64 blocks or more then (16 for each of fewer than four other nodes), and the last
// link waits for one of each node between.
inline constexpr size_t kChainBytes = 256 << 10;

// How fine an operation is cut.
struct Grain {
  size_t blocks;               // as many at least, if messages are not too small then
  size_t least_message_bytes;  // a leader sends to another in a block
};
// Messages of 64 KiB up to 4 MiB between two leaders, so that a slow link's queue holds those that
// are on their way; larger ones of more, which cost less processor time.
inline constexpr Grain kCoarse{64, 64 << 10};
// For links that wait for what another link has carried: they are idle for the first kLanes blocks.
inline constexpr Grain kFine{32, 16 << 10};
// For a chain, whose last link waits for a block of each before it.
inline constexpr Grain kFinest{64, 16 << 10};

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
  const size_t most = std::min(kMostMessageBytes, layout.chunk_bytes * 2 / mpi::kLanes);
  const size_t message = longest * element * streams / (shares * grain.blocks);
  const size_t bytes = std::clamp(message, std::min(grain.least_message_bytes, most), most);
  const size_t block = std::max<size_t>(1, bytes / (element * streams)) * shares;
  return {block, std::max<size_t>(1, (longest + block - 1) / block)};
}

}  // namespace hbm::hierarchical
