// The records of sessions and of operations in progress. Their layout in plain memory is the same
// as in the files that survive the process (records.h).
//
// The records ensure that each operation is executed exactly once. An operation has begun when
// `active` of its record is 1, and is done when `applied` of its session has reached its number. A
// part of an operation is a sequence of chunks of the target, which one thread executes in order.
// While the operation is in progress, the progress of a part is
//
//   progress = 2k      k chunks of the part are done
//   progress = 2k + 1  the undo buffer of the part has the old data of chunk k; the chunk itself
//                      may be anything between old and new
//
// Recovery frees the records of operations that are done. It restores each chunk whose part has odd
// progress, executes the remaining chunks, and sets `applied`.
//
// A kill stops each thread between two instructions, and every store before that is in the file. So
// only the order of a thread's own stores matters. `active`, `progress`, `used` and `applied` are
// stored with release order after the data that they validate, and loaded with acquire order before
// the data are read. Odd progress is stored by an exchange that also has acquire order, so that no
// store to the target comes before it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "box/protocol/protocol.h"
#include "box/server/storage/checked_number.h"
#include "kernels/accumulate.h"

namespace hbm::box::server::storage {

// Each record has a checksum, and so has each number that says that a record is complete: `used`,
// `applied` and `active` (checked_number.h). So the next box can tell damage from the state after a
// kill. An incomplete record may have any value, but the checksum of every complete record is
// right.

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The outcome of a sequenced request.
struct RequestOutcome {
  uint64_t number = 0;
  int64_t value = 0;  // kFetchAdd: value of the cell before the addition
  protocol::Status status = protocol::Status::kOk;
  uint16_t reserved = 0;
  uint32_t check = 0;  // SessionRecord::check_of()
};
static_assert(sizeof(RequestOutcome) == 24 && std::is_trivially_copyable_v<RequestOutcome>);

// Threads: only the thread that executes the requests of the session; any may read `applied`.
struct SessionRecord {
  CheckedNumber used;  // 1, or 0: free
  protocol::Id id;
  uint64_t check = 0;     // checksum of `id`
  CheckedNumber applied;  // every request up to this number has been executed
  RequestOutcome outcomes[protocol::kSequencedInFlight];  // of the last requests, by number %
                                                          // kSequencedInFlight

  // Returns the outcome of request `number`, or null if it is not among the last
  // kSequencedInFlight.
  const RequestOutcome* outcome(uint64_t number) const noexcept {
    const RequestOutcome& kept = outcomes[number % protocol::kSequencedInFlight];
    const uint64_t last = applied.load(std::memory_order_acquire);
    return number != 0 && number <= last && kept.number == number ? &kept : nullptr;
  }

  uint32_t check_of(RequestOutcome outcome) const noexcept {
    outcome.check = 0;
    return static_cast<uint32_t>(checksum(check, outcome));
  }

  // Returns true if a box can have left the record like this. Only the entry of the next outcome
  // may be incomplete.
  bool sound() const noexcept;
};
static_assert(std::is_standard_layout_v<SessionRecord>);

struct alignas(64) PartProgress {
  CheckedNumber progress;
};

// The start of a range: the segment of the store (segment.h), and the offset in it.
struct SegmentOffset {
  uint64_t serial = 0;
  uint64_t offset = 0;
};

// The arguments of an accumulate or a fetch-and-add.
struct BoxOperation {
  protocol::Opcode opcode{};  // kAccumulate or kFetchAdd
  uint8_t reserved[3] = {};
  uint32_t parts = 1;   // number of parts
  uint64_t number = 0;  // sequence number of the request
  SegmentOffset target;
  SegmentOffset source;        // kAccumulate
  uint64_t bytes = 0;          // of the target
  kernels::Formula formula{};  // kAccumulate
  int64_t addend = 0;          // kFetchAdd
};
static_assert(sizeof(kernels::Formula) == 16 && std::is_trivially_copyable_v<kernels::Formula>);

struct alignas(64) OperationRecord {
  CheckedNumber active;  // 1, or 0: free
  protocol::Id session_id;
  uint64_t session = 0;  // index of the session's record
  BoxOperation what;
  uint64_t check = 0;  // check_of()

  uint64_t check_of() const noexcept { return checksum(checksum(session, session_id), what); }

  // Returns true if a box can have left the record and its parts like this.
  bool sound(const PartProgress* progress, uint32_t most_parts) const noexcept;
};
static_assert(std::is_standard_layout_v<OperationRecord>);
static_assert(sizeof(BoxOperation) == 80 && sizeof(OperationRecord) == 128);

}  // namespace hbm::box::server::storage
