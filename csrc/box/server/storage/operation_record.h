// The records that a box has of its sessions and of the operations that it is carrying out, laid
// out alike in plain memory and in the files that survive the process (records.h).
//
// Exactly once. An operation is begun when its record's `active` is 1 and done when its session's
// `applied` has reached its number. In between each lane, a range of the target's chunks that one
// thread takes at a time, says how far it is:
//
//   progress = 2k      k chunks of it are done
//   progress = 2k + 1  the lane's undo buffer holds what chunk k was; the chunk itself may be
//                      anything between before and after
//
// Whoever finds the records of a process that was killed frees the operations that are done, puts
// chunks of odd progress back, carries out the rest, and sets `applied`.
//
// A thread is killed between two of its instructions, and all that it stored before is then in the
// file, so the order of its own stores is all that matters. Pairings: `active`, `progress`, `used`
// and `applied` are stored with release order after what they vouch for, and loaded with acquire
// order before it is looked at; odd progress is exchanged with acquire order too, which keeps the
// stores to the target behind it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "box/protocol/protocol.h"
#include "box/server/storage/sealed_number.h"
#include "kernels/accumulate.h"

namespace hbm::box {

// Each record carries a checksum, and so does the number that vouches for it (sealed_number.h). So
// damage is told from what a killed process leaves: a record for which no number vouches may be
// anything, and any other is sound.

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// How a sequenced request ended.
struct RequestOutcome {
  uint64_t number = 0;
  int64_t value = 0;  // kFetchAdd: what the cell held before
  smb::Status status = smb::Status::kOk;
  uint16_t reserved = 0;
  uint32_t check = 0;  // check_of(), in a SessionRecord
};
static_assert(sizeof(RequestOutcome) == 24 && std::is_trivially_copyable_v<RequestOutcome>);

// Threads: one at a time, the one that carries out the session's requests; `applied` may be read by
// any.
struct SessionRecord {
  SealedNumber used;  // 1, or 0: free
  smb::Id id;
  uint64_t check = 0;                     // of `id`
  SealedNumber applied;                   // every request up to this number has been carried out
  RequestOutcome outcomes[smb::kWindow];  // of the last ones, by number % kWindow

  // How request `number` ended, or null if it is not among the last kWindow.
  const RequestOutcome* outcome(uint64_t number) const noexcept {
    const RequestOutcome& kept = outcomes[number % smb::kWindow];
    const uint64_t last = applied.load(std::memory_order_acquire);
    return number != 0 && number <= last && kept.number == number ? &kept : nullptr;
  }

  uint32_t check_of(RequestOutcome outcome) const noexcept {
    outcome.check = 0;
    return static_cast<uint32_t>(checksum(check, outcome));
  }

  // Whether it is as some instruction left it. The place of the next outcome may be half written.
  bool sound() const noexcept;
};
static_assert(std::is_standard_layout_v<SessionRecord>);

struct alignas(64) LaneProgress {
  SealedNumber progress;
};

// Where a range lies: in which segment of the store (segment.h), and at which byte.
struct SegmentOffset {
  uint64_t serial = 0;
  uint64_t offset = 0;
};

// An accumulate or a fetch-and-add, in full.
struct BoxOperation {
  smb::Opcode opcode{};  // kAccumulate or kFetchAdd
  uint8_t reserved[3] = {};
  uint32_t lanes = 1;   // in use
  uint64_t number = 0;  // of the session's request
  SegmentOffset target;
  SegmentOffset source;  // kAccumulate
  uint64_t bytes = 0;    // of the target
  Formula formula{};     // kAccumulate
  int64_t addend = 0;    // kFetchAdd
};
static_assert(sizeof(Formula) == 16 && std::is_trivially_copyable_v<Formula>);

struct alignas(64) OperationRecord {
  SealedNumber active;  // 1, or 0: free
  smb::Id session_id;
  uint64_t session = 0;  // index of its record
  BoxOperation what;
  uint64_t check = 0;  // check_of()

  uint64_t check_of() const noexcept { return checksum(checksum(session, session_id), what); }

  // Whether the record and its lanes are as some instruction left them.
  bool sound(const LaneProgress* progress, uint32_t most_lanes) const noexcept;
};
static_assert(std::is_standard_layout_v<OperationRecord>);
static_assert(sizeof(BoxOperation) == 80 && sizeof(OperationRecord) == 128);

}  // namespace hbm::box
