// The facts that an operation notes of itself while it runs, for a profile of the process
// (process_group/profile.h).
//
// Threads: an operation writes its Observation in begin() and poll(), so the queue orders the
// writes (progress/operation.h). times_noted is an atomic of the process.
#pragma once

#include <atomic>
#include <cstdint>

namespace hbm::progress {

// A part of an operation is another operation that it runs, such as a stage of a collective over
// several nodes.
struct Observation {
  // True if data that this rank sent or received was copied through slots, mailboxes or messages.
  bool staged = false;
  // True if data that this rank sent or received was read or written where the tensors are. Both
  // are true if an operation moves a part of its data in each way.
  bool zero_copy = false;
  // The rank of this node that began the operation last, by its number in the group; -1: this rank
  // began last, or the last rank is not known.
  int last_rank = -1;
  int64_t waited_ns = 0;  // from this rank's begin until the begin of last_rank

  // Adds the observation of a part. A rank that is late is late for the first part.
  void add(const Observation& part, bool is_first) noexcept {
    staged = staged || part.staged;
    zero_copy = zero_copy || part.zero_copy;
    if (!is_first) return;
    last_rank = part.last_rank;
    waited_ns = part.waited_ns;
  }
};

// True if operations read the clock to find the last rank. While it is false, last_rank stays -1.
// Relaxed: an operation that begins during a change may or may not read the clock.
inline std::atomic<bool> times_noted{false};

}  // namespace hbm::progress
