// Executes kAccumulate and kFetchAdd on the memory of segments.
//
// Concurrent operations on overlapping ranges lose no update. An operation is executed in steps,
// one for each chunk of its target (bound_operation.h), and each step runs under the lock of its
// chunk. Other operations may run between the steps, so a large operation is not atomic as a whole.
// Writes of clients take no such lock. So if a client writes to a chunk during a step on that
// chunk, the step may overwrite the written data.
//
// With records in files, each operation is applied exactly once even if the process is killed
// (operation_record.h, recovery.h).
//
// Threads: any, but one at a time for one session. The caller executes its share of the work.
//
// Errors: as Records. Once the disk has failed under `sync`, every member throws, and this server
// must stop. The next server that opens the store completes the requests that had begun.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "box/server/storage/bound_operation.h"
#include "box/server/storage/records.h"
#include "box/server/storage/segment.h"
#include "kernels/accumulate.h"

namespace hbm::box::server {

// The start of a range in a segment.
struct At {
  storage::BoxSegment& segment;
  uint64_t offset;  // bytes
};

class Accumulator {
 public:
  // A large operation is executed by `threads` threads: the caller, and others that all callers
  // share. REQUIRES: threads >= 1; `records` outlives this object.
  Accumulator(storage::Records& records, unsigned threads);

  // Applies the formula (kernels/accumulate.h) to `bytes` of the target, then finishes request
  // `number`. REQUIRES: accumulate_unsupported() accepts the types; both ranges are inside their
  // segments and aligned to their types; `bytes` is a multiple of the target's element size, or 0;
  // two ranges of one segment do not overlap, or are the same range with the same type; number ==
  // session.applied + 1.
  void accumulate(storage::SessionRecord& session, uint64_t number, At target, At source,
                  uint64_t bytes, const kernels::Formula& formula);

  // Adds to the int64 at `cell`, wrapping, then finishes request `number`. Returns the value before
  // the addition. REQUIRES: the cell is inside its segment, at a multiple of 8; number ==
  // session.applied + 1.
  int64_t fetch_add(storage::SessionRecord& session, uint64_t number, At cell, int64_t addend);

 private:
  uint32_t parts_for(uint64_t offset, uint64_t bytes) const;
  void run(const storage::BoundOperation& operation, const storage::Recorded& recorded);

  storage::Records& records_;
  const unsigned threads_;
  storage::Stripes stripes_;
  ThreadPool pool_;
};

}  // namespace hbm::box::server
