// The memory that a rank shows its neighbours: the layout of one group's area in the rank's
// segment, and of the mailboxes in it. docs/design/shared-memory.md is this header's twin.
//
// The owner alone writes its area, but for the fields that say otherwise; everybody on the node
// reads it. All ranks of a node run the same version on the same processor, so structs are the
// format.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "communicator/message.h"
#include "communicator/shm/tuning.h"

namespace hbm::shm {

inline constexpr size_t kCacheLine = 64;
inline constexpr uint64_t kAreaMagic = 0x376165726d6268;  // "hbmrea7": another layout, another one

// How a rank is woken. See ShmGroup::sleep().
struct alignas(kCacheLine) Doorbell {
  std::atomic<uint32_t> bell;    // counts rings; anyone on the node adds to it
  std::atomic<uint32_t> asleep;  // threads of the owner that sleep on `bell`, or are about to
};

// The first failure that anyone on the node has noticed. That of the first member counts for all.
struct FailureReport {
  enum ReportState : uint32_t { kNone, kWriting, kWritten };
  std::atomic<uint32_t> state;  // who takes it from kNone to kWriting writes the rest
  uint32_t death;               // 1: another rank's process has ended
  std::array<char, 1000> text;
};

// Where the data of one stream, from the area's owner to one member, is to be found.
struct StreamLocation {
  enum StreamKind : uint32_t {
    kSlots,     // in the slots, chunk by chunk
    kZeroCopy,  // in the owner's segment, all of it
    // No such stream: the place in the owner's segment for the one from that member, which copies
    // it there if it lies in its own segment. In a gather.
    kDestination,
  };
  uint64_t count;   // elements of the stream
  uint64_t offset;  // kSlots: from the start of a slot's data; else from the segment's
  uint32_t kind;
  uint32_t unused;
};

// The fields of a MessageHeader that all members of a phase compare.
struct PhaseHeader {
  // Inline, so that the fields are stored in the slot itself.
  PhaseHeader(const Signature& signature, uint64_t count, uint32_t part) noexcept
      : magic(kMagic),
        op(static_cast<uint8_t>(signature.op)),
        dtype(static_cast<uint8_t>(signature.dtype)),
        reduce_op(static_cast<uint8_t>(signature.reduce_op)),
        root(signature.root),
        part(part),
        sequence(signature.sequence.number),
        count(count),
        whole(signature.sequence.whole) {}
  MessageHeader message() const noexcept;
  bool operator==(const PhaseHeader&) const = default;

  uint32_t magic;
  uint8_t op;
  uint8_t dtype;
  uint8_t reduce_op;
  int32_t root;
  uint32_t part;
  uint64_t sequence;
  uint64_t count;
  uint64_t whole;
};

inline constexpr size_t kTinyBytes = 16;  // of data that fits into a slot's first cache line

// A member's part of one phase. A StreamLocation for each member follows, then the data. Of a
// reduction of up to kTinyBytes the others read the first cache line alone.
struct alignas(kCacheLine) Slot {
  std::atomic<uint64_t> phase;  // the last one in which the owner published this slot
  PhaseHeader header;
  std::array<std::byte, kTinyBytes> tiny;    // data that has room here
  alignas(kCacheLine) StreamLocation place;  // of a reduction's buffer
  uint64_t chunk;                            // bytes of a stream in one slot
  uint64_t rounds;                           // phases that the streams in slots need
  uint32_t zero_copy;  // 1: some stream is kZeroCopy, so a last phase must say that it was read
  // Elements of the streams that the owner sends, each times the key of its sender and receiver
  // (ShmGroup::key_to()), minus the elements that it expects, times their keys. The balances of all
  // members add up to 0 if every receiver expects the count that its sender sends.
  uint64_t balance;
};
static_assert(sizeof(Slot) == 2 * kCacheLine);
static_assert(offsetof(Slot, tiny) + kTinyBytes == kCacheLine);

struct alignas(kCacheLine) Control {
  uint64_t magic;
  uint64_t chunk_bytes;
  alignas(kCacheLine) std::atomic<uint32_t> left;  // 1: the owner destroyed the group
  // Neighbours that will not look here again; each adds itself.
  alignas(kCacheLine) std::atomic<uint32_t> released;
  Doorbell collectives;
  Doorbell transfers;
  FailureReport failure;
};

// An ordered pair of ranks has a mailbox: a ring of envelopes in the sender's area, which hold
// small messages whole and say where large ones are.
//
// Envelope o lies in cell o % kCells. The sender fills a cell that is free and posts it (release);
// the receiver takes posted cells in order (acquire), and frees them (release) as soon as it has
// copied the envelope, whether or not a receive is waiting for it.
inline constexpr size_t kCells = 8;
inline constexpr size_t kCellBytes = 4096;

struct Envelope {
  enum EnvelopeKind : uint32_t {
    kInline,    // the message follows
    kZeroCopy,  // the message lies in the sender's segment
    kStaged,    // the message comes through the transfer's chunks
  };
  MessageHeader header;  // root: the tag
  uint32_t kind;
  uint32_t unused;
  uint64_t message;   // kZeroCopy: offset in the sender's segment
  uint64_t transfer;  // kZeroCopy, kStaged: offset of the MessageTransfer in the sender's segment
};

struct alignas(kCacheLine) Cell {
  enum CellState : uint32_t { kFree, kPosted };
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
// message is staged: chunk k of the message lies in place k % kStagedChunksInFlight.
//
// `state` decides who may touch what. The receiver takes an open transfer before it reads anything,
// the sender withdraws one that it gives up; both by compare and exchange, so one of them wins. A
// message that was withdrawn was never sent. Whichever it was, the receiver ends the transfer, and
// does not look at it again: then, not before, the sender gives the block back.
struct alignas(kCacheLine) MessageTransfer {
  enum TransferState : uint32_t {
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
  void end(TransferState how) noexcept { state.store(how, std::memory_order_release); }

  // True if the transfer was open and is `to` now.
  bool leave_open(TransferState to) noexcept {
    uint32_t open = kOpen;
    return state.compare_exchange_strong(open, to, std::memory_order_acq_rel);
  }
};

// The chunks of a staged message of `bytes`.
constexpr size_t staged_chunk_bytes(size_t bytes) noexcept {
  return bytes < kLongStagedMessageBytes ? kShortStagedChunkBytes : kLongStagedChunkBytes;
}

// `filled` of a message that the sender gave up after the receiver had taken it.
inline constexpr uint64_t kNoMore = ~uint64_t{0};

// Offsets in an area of a ShmGroup of `members`.
struct AreaLayout {
  AreaLayout(size_t members, size_t chunk_bytes);

  size_t chunk_bytes;  // of a reduction's slot
  size_t data;         // where a slot's data starts: behind a StreamLocation for each member
  size_t data_bytes;   // room for data: two to four chunks, and a cache line for each member
  size_t slot;         // of slot 0; slot 1 follows
  size_t slot_stride;
  size_t mail;  // of the mailbox for member 0; the others follow
  size_t mail_stride;
  size_t total;
};

// Sets up an area in fresh or used memory. Called by the owner, before anyone else sees it.
void format_area(std::byte* area, const AreaLayout& layout) noexcept;

}  // namespace hbm::shm
