// Sees the deaths of a group's ranks while the group is being made.
// csrc/communicator/failure/failure_detector.h implements it.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

struct Member;

class RankWatch {
 public:
  virtual ~RankWatch() = default;

  // A rank has introduced itself.
  virtual void met(int rank, const Member& member) = 0;

  // Waits until rank 0, which has been met, would see this rank's death, or until the deadline.
  virtual void await_sight(KeyValue::Deadline deadline) = 0;

  // Throws Error(kDeath) naming those of `ranks` that have died. Waits for nothing but, where it
  // throws, for the word to be out (200 ms at most).
  virtual void check(const std::vector<int>& ranks) = 0;

  // Tells of ranks that have died, for an error that is the consequence: ". Rank 0 (pid
  // 4711 on host) has died"; empty if there is none. Waits a moment for proof.
  virtual std::string deaths() = 0;

  // Tells the processes of a group that may have been formed that another process has come as one
  // of its ranks. `first`: the process_id() of its rank 0. `prefix`: of its keys. `mailboxes`: the
  // mailbox_id() of its ranks. Waits 200 ms at most. Throws nothing.
  virtual void tell_claimed_twice(const std::string& /*first*/, const std::string& /*prefix*/,
                                  const std::vector<std::string>& /*mailboxes*/,
                                  const std::string& /*why*/) noexcept {}
};

}  // namespace hbm::bootstrap
