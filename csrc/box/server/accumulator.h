// Carries out kAccumulate and kFetchAdd on the memory of segments.
//
// Operations on overlapping ranges lose nothing: each step, the part of one that lies in one chunk
// of its target (bound_operation.h), runs under a lock of that chunk. Between steps other
// operations may come in, so a large one is not atomic as a whole. Clients that write to the same
// bytes directly, past the server, meanwhile may see their write overwritten.
//
// Where the records lie in files, each operation is carried out exactly once although the process
// may be killed at any time (operation_record.h, recovery.h).
//
// Threads: every member may be called from any thread; for one session by one at a time. The caller
// does its share of the work.
//
// Errors: as Records: once the disk has failed under `sync`, every member throws. A request that
// was begun is then for the next server that opens the store to carry out, and this one must stop.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "box/server/storage/bound_operation.h"
#include "box/server/storage/records.h"
#include "box/server/storage/segment.h"
#include "kernels/accumulate.h"

namespace hbm::box {

// A range of a segment starts here.
struct At {
  BoxSegment& segment;
  uint64_t offset;  // bytes
};

class Accumulator {
 public:
  // `threads` work on a large operation together, the calling one included; those that this object
  // has besides are shared by all callers. REQUIRES: threads >= 1, and `records` outlives it.
  Accumulator(Records& records, unsigned threads);

  // Applies the formula (kernels/accumulate.h) to `bytes` of the target, then finishes request
  // `number`. REQUIRES: accumulate_unsupported() does not reject the types; both ranges lie inside
  // their segments and are aligned to their types; bytes is a multiple of the target's element, and
  // may be 0; two ranges of one segment are apart, or the same with the same type;
  // number == session.applied + 1.
  void accumulate(SessionRecord& session, uint64_t number, At target, At source, uint64_t bytes,
                  const Formula& formula);

  // Adds to the int64 at `cell`, which wraps, then finishes request `number`. Returns what was
  // there before. REQUIRES: the cell lies inside its segment, at a multiple of 8;
  // number == session.applied + 1.
  int64_t fetch_add(SessionRecord& session, uint64_t number, At cell, int64_t addend);

 private:
  uint32_t lanes_for(uint64_t offset, uint64_t bytes) const;
  void run(const BoundOperation& operation, const Recorded& recorded);

  Records& records_;
  const unsigned threads_;
  Stripes stripes_;
  ThreadPool pool_;
};

}  // namespace hbm::box
