// The mailbox of one ordered pair of ranks: a ring of envelopes in the sender's area, which hold
// small messages whole and say where large ones are. docs/node.md is this header's twin.
//
// Envelope o lies in cell o % kCells. The sender fills a cell that is free and posts it (release);
// the receiver takes posted cells in order (acquire), and frees them (release) as soon as it has
// copied the envelope, whether or not a receive is waiting for it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "node/area.h"

namespace hbm::node {

inline constexpr size_t kCells = 8;
inline constexpr size_t kCellBytes = 4096;

struct Envelope {
  enum Kind : uint32_t {
    kInline,  // the message follows
    kDirect,  // the message lies in the sender's segment
    kStaged,  // the message comes through the transfer's two chunks
  };
  MessageHeader header;  // root: the tag
  uint32_t kind;
  uint32_t unused;
  uint64_t message;   // kDirect: offset in the sender's segment
  uint64_t transfer;  // kDirect, kStaged: offset of the Transfer in the sender's segment
  uint64_t chunk;     // kStaged: bytes of a chunk
};

struct alignas(kCacheLine) Cell {
  enum State : uint32_t { kFree, kPosted };
  std::atomic<uint32_t> state;
  Envelope envelope;
  static constexpr size_t kInlineBytes = kCellBytes - 2 * kCacheLine;
  alignas(kCacheLine) std::array<std::byte, kInlineBytes> message;
};
static_assert(sizeof(Cell) == kCellBytes);

struct Mailbox {
  std::array<Cell, kCells> cells;
};

// A large message under way. In a block of the sender's segment, in front of two chunks if the
// message is staged.
struct alignas(kCacheLine) Transfer {
  alignas(kCacheLine) std::atomic<uint64_t> filled;   // chunks that the sender has put in
  alignas(kCacheLine) std::atomic<uint64_t> drained;  // chunks that the receiver has taken out
};

// `drained` of a message that the receiver does not take: it does not fit.
inline constexpr uint64_t kRefused = ~uint64_t{0};

}  // namespace hbm::node
