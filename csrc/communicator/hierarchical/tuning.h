// Thresholds of collectives over several nodes: leaders, and the blocks of their pipeline. All
// ranks decide alike, because they compare only sizes and the layout of the nodes. An alltoall is
// the exception. Its ranks may have different sizes, so some ranks may take turns (send to one
// other node at a time) and others not. docs/design/hierarchical.md has the reasons.
// Measure: `python -m benchmarks.collectives.nodes --layout 2x4 --rate 200mbit`

#pragma once

#include <chrono>
#include <cstddef>

#include "communicator/mpi/tuning.h"

namespace hbm::communicator::hierarchical {

// -- Leaders and turns

// The most bytes of an operation with one leader for each node.
// Unit: bytes
// Below: up to and including the value, each node has one leader: more leaders would only add
// messages.
// Above: each node uses all its leaders.
inline constexpr size_t kOneLeaderBytes = 64 << 10;

// The most bytes that are sent to other nodes without pacing, that is, without turns or answers. An
// allgather counts the bytes of all transfers. An alltoall counts the bytes of its longest
// transfer, and a broadcast to one other node the bytes of the tensor. For an alltoall the limit is
// the chunk of messages, if the chunk is smaller than this value.
// Unit: bytes
// Below: up to and including the value, all is sent together: pacing would only add latencies.
// Above: the nodes take turns in an allgather and an alltoall. In a broadcast the receiving leaders
// answer each block.
inline constexpr size_t kUnpacedBytes = 64 << 10;

// The longest message between nodes in an alltoall with turns, unless the chunk of messages is
// smaller.
// Unit: bytes
// Below: a smaller value costs more messages.
// Above: a larger value fills the queue of a slow link, which then drops packets.
inline constexpr size_t kLongestTurnMessageBytes = 128 << 10;

// A broadcast sends its tensor along a chain of nodes if the tensor has at least this many bytes
// for each leader of each receiving node. Then there are at least 32 blocks with two receiving
// nodes, 48 with three, and 64 with more. Many blocks matter, because the last link waits for one
// block of each link before it.
// Unit: bytes
// Below: the root's node sends to each other node.
// Above: from the value on, each node passes the blocks on to the next node.
// Measure: `python -m benchmarks.collectives.nodes --layout 4x2 --rate 200mbit --collective
// broadcast`
inline constexpr size_t kChainBytesPerLeader = 256 << 10;

// -- Blocks

// The longest message between two leaders in a block, unless the chunk of messages is smaller.
// Unit: bytes
// Below: a smaller value costs more processor time for large tensors.
// Above: a larger value fills the queue of a slow link.
inline constexpr size_t kLongestBlockMessageBytes = 256 << 10;

// The number of blocks into which an operation is cut, if no link waits for the data of another
// link. If a leader sends up to 4 MiB to another leader, a message has the 64 KiB of
// kCoarseMessageBytes. So the queue of a slow link has room for the messages in flight. For more
// bytes the messages are longer, and cost less processor time.
// Unit: blocks
// Below: an operation has fewer blocks only if its messages would be under kCoarseMessageBytes.
// Above: an operation has more blocks only if its messages would be longer than
// kLongestBlockMessageBytes or the chunk of messages.
inline constexpr size_t kCoarseBlocks = 64;

// The least message between two leaders in an operation that is cut into kCoarseBlocks blocks.
// Unit: bytes
// Below: the operation has fewer blocks, so that its messages are as long as the value.
// Above: the operation has kCoarseBlocks blocks or more.
inline constexpr size_t kCoarseMessageBytes = 64 << 10;

// The number of blocks of an operation in which a link waits for data that another link has
// carried. This is so in a reduce of three and more nodes, and in a broadcast to several nodes
// without a chain. Such a link is idle for the first blocks.
// Unit: blocks
// Below: an operation has fewer blocks only if its messages would be under kFineMessageBytes.
// Above: an operation has more blocks only if its messages would be longer than
// kLongestBlockMessageBytes or the chunk of messages.
inline constexpr size_t kFineBlocks = 32;

// The least message between two leaders in an operation that is cut into kFineBlocks blocks.
// Unit: bytes
// Below: the operation has fewer blocks, so that its messages are as long as the value.
// Above: the operation has kFineBlocks blocks or more.
inline constexpr size_t kFineMessageBytes = 16 << 10;

// The number of blocks of a broadcast along a chain of nodes. The last link of the chain waits for
// a block of each link before it.
// Unit: blocks
// Below: an operation has fewer blocks only if its messages would be under kChainMessageBytes.
// Above: an operation has more blocks only if its messages would be longer than
// kLongestBlockMessageBytes or the chunk of messages.
inline constexpr size_t kChainBlocks = 64;

// The least message between two leaders in a broadcast along a chain.
// Unit: bytes
// Below: the operation has fewer blocks, so that its messages are as long as the value.
// Above: the operation has kChainBlocks blocks or more.
inline constexpr size_t kChainMessageBytes = 16 << 10;

// The most blocks that have completed node_in() before node_out() of the first block begins, in an
// operation that needs no scratch memory. The link has fewer blocks in flight, so the node works
// while the link is busy.
// Unit: blocks
// Below: the node runs node_in() of the next block.
// Above: from the value on, the node runs node_out() of a block before node_in() of the next one.
// Measure: `python -m benchmarks.collectives.nodes --layout 2x2 --rate 1gbit --delay 10`
inline constexpr size_t kMostBlocksAhead = mpi::kTagRanges + 1;

// The most such blocks of an operation whose scratch memory has no room for more.
// Unit: blocks
// Below: a smaller value leaves the link idle while the node works.
// Above: a larger value takes more scratch memory.
inline constexpr size_t kLeastBlocksAhead = mpi::kLeastInFlight + 1;

// The scratch memory of a leader in an operation that needs scratch memory for each block.
// Unit: bytes
// Below: the operation is as many blocks ahead as the value has room for.
// Above: an operation that takes more is kLeastBlocksAhead blocks ahead.
// Measure: `python -m benchmarks.collectives.nodes --layout 2x2 --rate 1gbit --delay 10
// --collective reduce_scatter`
inline constexpr size_t kMostScratchBytes = 4 << 20;

// -- Waits

// The period in which a leader that waits for the link checks the processes of its node.
// Below: a smaller value makes more system calls.
// Above: a larger value delays the error after a death on the node.
// Measure: `pytest tests/python/failures/test_deaths.py -k test_death_on_another_node`
inline constexpr std::chrono::milliseconds kNodeCheckPeriod{20};

// The longest sleep of a leader that waits for its node and for the link. Only its node wakes it.
// Below: a smaller value takes more processor time.
// Above: a larger value delays messages of the link.
inline constexpr std::chrono::microseconds kLongestSleepForNode{500};

}  // namespace hbm::communicator::hierarchical
