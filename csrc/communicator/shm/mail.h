// The mailbox of one ordered pair of ranks: a ring of envelopes in the sender's area, which hold
// small messages whole and say where large ones are. docs/design/shared-memory.md is this header's
// twin.
//
// Envelope o lies in cell o % kCells. The sender fills a cell that is free and posts it (release);
// the receiver takes posted cells in order (acquire), and frees them (release) as soon as it has
// copied the envelope, whether or not a receive is waiting for it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "communicator/shm/area.h"

namespace hbm::shm {

inline constexpr size_t kCells = 8;
inline constexpr size_t kCellBytes = 4096;

struct Envelope {
  enum Kind : uint32_t {
    kInline,    // the message follows
    kZeroCopy,  // the message lies in the sender's segment
    kStaged,    // the message comes through the transfer's two chunks
  };
  MessageHeader header;  // root: the tag
  uint32_t kind;
  uint32_t unused;
  uint64_t message;   // kZeroCopy: offset in the sender's segment
  uint64_t transfer;  // kZeroCopy, kStaged: offset of the MessageTransfer in the sender's segment
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

// A large message under way. In a block of the sender's segment, in front of the chunks if the
// message is staged: chunk k of the message lies in place k % kStagedChunks.
//
// `state` decides who may touch what. The receiver takes an open transfer before it reads anything,
// the sender withdraws one that it gives up; both by compare and exchange, so one of them wins. A
// message that was withdrawn was never sent. Whichever it was, the receiver ends the transfer, and
// does not look at it again: then, not before, the sender gives the block back.
struct alignas(kCacheLine) MessageTransfer {
  enum State : uint32_t {
    kOpen,
    kTaken,      // by the receiver
    kWithdrawn,  // by the sender
    kDone,       // ended by the receiver, like all that follow: it has the whole message
    kRefused,    // it expects another type or size
    kGivenUp,    // it wants no more of the message, or has seen that it was withdrawn
  };
  alignas(kCacheLine) std::atomic<uint64_t> filled;   // chunks that the sender has put in
  alignas(kCacheLine) std::atomic<uint64_t> drained;  // chunks that the receiver has taken out
  std::atomic<uint32_t> state;

  bool ended() const noexcept { return state.load(std::memory_order_acquire) >= kDone; }
  void end(State how) noexcept { state.store(how, std::memory_order_release); }

  // True if the transfer was open and is `to` now.
  bool leave_open(State to) noexcept {
    uint32_t open = kOpen;
    return state.compare_exchange_strong(open, to, std::memory_order_acq_rel);
  }
};

inline constexpr size_t kStagedChunkBytes = size_t{128} * 1024;
inline constexpr size_t kStagedChunks = 2;  // in flight

// `filled` of a message that the sender gave up after the receiver had taken it.
inline constexpr uint64_t kNoMore = ~uint64_t{0};

}  // namespace hbm::shm
