// The layout of a control region: a block of a rank's segment that its local peers use for one
// group. A region has slots and mailboxes. docs/design/shared-memory.md is this header's
// counterpart: change both together, and kRegionMagic with the layout.
//
// The owner alone writes its region, except the fields whose comments say otherwise. Every rank of
// the node reads it. All ranks of a node run the same version on the same processor, so structs are
// the format.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/life_sign.h"
#include "communicator/message.h"
#include "communicator/shm/tuning.h"

namespace hbm::communicator::shm {

inline constexpr size_t kCacheLine = 64;
inline constexpr uint64_t kRegionMagic = 0x396165726d6268;  // "hbmrea9": change it with the layout

// Wakes the threads of a rank. See ShmGroup::sleep().
struct alignas(kCacheLine) Doorbell {
  std::atomic<uint32_t> bell;    // counts rings; any rank of the node adds to it
  std::atomic<uint32_t> asleep;  // threads of the owner that sleep on `bell`, or are about to
};

// The first failure that a rank of the node has noticed. Only the report in the region of local
// rank 0 counts.
struct FailureReport {
  enum ReportState : uint32_t { kNone, kWriting, kWritten };
  // The rank that changes `state` from kNone to kWriting writes the other fields.
  std::atomic<uint32_t> state;
  uint32_t death;  // 1: the process of another rank has ended
  std::array<char, 1000> text;
};

// The location of the data of one transfer, from the region's owner to one local rank.
struct TransferLocation {
  enum LocationKind : uint32_t {
    kSlots,     // in the slots, chunk by chunk
    kZeroCopy,  // in the owner's segment, all of it
    // Used in a gather. The owner sends nothing to the local rank, and instead shows a destination
    // in the owner's segment. The local rank copies its tensor to the destination if the tensor is
    // in its own segment.
    kDestination,
  };
  uint64_t count;   // elements of the transfer
  uint64_t offset;  // kSlots: from the start of a slot's data; else from the start of the segment
  uint32_t kind;
  uint32_t unused;
};

// The fields of a MessageHeader that all ranks of a phase compare.
struct PhaseHeader {
  // Inline, so that the compiler stores the fields directly in the slot.
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

inline constexpr size_t kSlotInlineBytes = 16;  // the data that fits into a slot's first cache line

// The data that a rank publishes in one phase. In memory, a TransferLocation for each local rank
// follows the slot, and then the data of transfers and reductions. In a reduction of up to
// kSlotInlineBytes the other ranks read only the first cache line.
struct alignas(kCacheLine) Slot {
  std::atomic<uint64_t> phase;  // the last phase in which the owner published this slot
  PhaseHeader header;
  std::array<std::byte, kSlotInlineBytes> inline_data;  // data of up to kSlotInlineBytes
  alignas(kCacheLine) TransferLocation location;        // of a reduction's buffer
  uint64_t chunk;                                       // bytes of a transfer in one slot
  uint64_t rounds;                                      // phases that the transfers in slots need
  uint32_t zero_copy;  // 1: a transfer is kZeroCopy, so a completion barrier must follow
  // A checksum of the counts. Each transfer that the owner sends adds its elements times its key
  // (ShmGroup::key_to()). Each transfer that the owner expects subtracts its elements times its
  // key. The checksums of all ranks add up to 0 if every receiver expects the count that its sender
  // sends.
  uint64_t balance;
  // In the first phase of an operation: the owner's Clock at its begin(), in ns. 0: not noted
  // (progress/observation.h).
  int64_t began;
};
static_assert(sizeof(Slot) == 2 * kCacheLine);
static_assert(offsetof(Slot, inline_data) + kSlotInlineBytes == kCacheLine);

struct alignas(kCacheLine) Control {
  uint64_t magic;
  uint64_t chunk_bytes;
  alignas(kCacheLine) std::atomic<uint32_t> left;  // 1: the owner destroyed the group
  LifeSign life;                                   // of the owner's process
  // The number of local peers that no longer use this region. Each local peer adds 1.
  alignas(kCacheLine) std::atomic<uint32_t> released;
  Doorbell collectives;
  Doorbell messages;
  FailureReport failure;
};

// Each ordered pair of ranks has a mailbox: a ring of envelopes in the sender's region. An envelope
// holds a message that fits into the cell, or the location of a longer one.
//
// Envelope o is in cell o % kCells. The sender fills a free cell and posts it (release). The
// receiver takes posted cells in order (acquire). The receiver frees a cell (release) as soon as it
// has copied the envelope, even if no receive waits for the message.
inline constexpr size_t kCells = 8;
inline constexpr size_t kCellBytes = 4096;

struct Envelope {
  enum EnvelopeKind : uint32_t {
    kInline,    // the message follows
    kZeroCopy,  // the message is in the sender's segment
    kStaged,    // the message comes through the chunks of the MessageTransfer
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

// The state of a message in flight that does not fit into a cell. It is at the start of a block of
// the sender's segment. If the message is staged, room for chunks follows: chunk k of the message
// is at index k % kStagedChunksInFlight.
//
// `state` decides which rank may use the transfer. The receiver takes an open transfer before it
// reads the message. The sender withdraws an open transfer that it cancels. Sender and receiver use
// compare-and-exchange, so only one of them succeeds. A withdrawn message counts as never sent. The
// receiver ends a transfer that it has taken or has found withdrawn, and does not access it again.
// Only then may the sender free the block.
struct alignas(kCacheLine) MessageTransfer {
  enum TransferState : uint32_t {
    kOpen,
    kTaken,      // by the receiver
    kWithdrawn,  // by the sender
    // The receiver ends the transfer with one of these states.
    kDone,       // the receiver has the whole message
    kRefused,    // the receiver expects another type or size
    kCancelled,  // the receiver cancelled, or has found the transfer withdrawn
  };
  alignas(kCacheLine) std::atomic<uint64_t> filled;   // chunks that the sender has put in
  alignas(kCacheLine) std::atomic<uint64_t> drained;  // chunks that the receiver has taken out
  std::atomic<uint32_t> state;

  bool ended() const noexcept { return state.load(std::memory_order_acquire) >= kDone; }
  void end(TransferState how) noexcept { state.store(how, std::memory_order_release); }

  // Changes `state` from kOpen to `to`. Returns false if it was not kOpen.
  bool leave_open(TransferState to) noexcept {
    uint32_t open = kOpen;
    return state.compare_exchange_strong(open, to, std::memory_order_acq_rel);
  }
};

// Returns the chunk size of a staged message of `bytes`.
constexpr size_t staged_chunk_bytes(size_t bytes) noexcept {
  return bytes < kLongStagedMessageBytes ? kShortStagedChunkBytes : kLongStagedChunkBytes;
}

// The value of `filled` if the sender cancelled the message after the receiver had taken it.
inline constexpr uint64_t kNoMore = ~uint64_t{0};

// Offsets in a control region of a ShmGroup of `local_size` ranks.
struct RegionLayout {
  RegionLayout(size_t local_size, size_t chunk_bytes);

  size_t chunk_bytes;  // the chunk of a reduction in a slot
  size_t data;         // offset of the data in a slot, after the TransferLocations
  size_t data_bytes;  // bytes for data: two to four chunks, and at least a cache line for each rank
  size_t slot;        // offset of slot 0; slot 1 follows
  size_t slot_stride;
  size_t mail;  // offset of the mailbox for local rank 0; the other mailboxes follow
  size_t mail_stride;
  size_t total;
};

// Initialises a region in fresh or used memory. Called by the owner before another rank knows the
// region.
void format_region(std::byte* region, const RegionLayout& layout) noexcept;

// Returns the control of a region.
inline Control& control_of(std::byte* region) noexcept {
  return *reinterpret_cast<Control*>(region);
}

}  // namespace hbm::communicator::shm
