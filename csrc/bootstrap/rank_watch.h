// Detects the deaths of a group's ranks while the group is being formed. Implemented in
// csrc/communicator/failure/failure_detector.h.
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

  // Begins to watch a rank that has introduced itself.
  virtual void met(int rank, const Member& member) = 0;

  // Waits until rank 0 would detect this rank's death, at most until the deadline. REQUIRES: met()
  // was called for rank 0.
  virtual void await_sight(KeyValue::Deadline deadline) = 0;

  // Throws Error(kDeath) naming the dead ranks of `ranks`. If none is dead, returns without a wait.
  // Before it throws, it waits until this process has published its reports and has read the
  // failure log, 200 ms at most.
  virtual void check(const std::vector<int>& ranks) = 0;

  // Returns a text that names the dead ranks of all groups, for an error that a death may have
  // caused: ". Meanwhile rank 0 (pid 4711 on host) has died". If no death is known, waits for up to
  // 300 ms. Empty if no death is known then.
  virtual std::string deaths() = 0;

  // Reports to the processes of a group that a second process has come as one of its ranks. The
  // group may be formed already. `first` is the process_id() of the group's rank 0, `prefix` the
  // prefix of the group's keys. `mailboxes` has the mailbox_id() of each of its ranks. `why` is the
  // text of the error that these ranks then throw. Waits 200 ms at most. Never throws.
  virtual void tell_claimed_twice(const std::string& /*first*/, const std::string& /*prefix*/,
                                  const std::vector<std::string>& /*mailboxes*/,
                                  const std::string& /*why*/) noexcept {}
};

}  // namespace hbm::bootstrap
