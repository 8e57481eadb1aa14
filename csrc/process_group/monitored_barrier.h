// A barrier that names the ranks that do not come. It goes over the store, so that it can tell who
// is missing even when MPI is stuck, and it leaves the group as it is.
//
// Rank 0 waits for the others and decides; they wait for its verdict.
//
// Threads: any; each passes a barrier of its own.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/gather.h"
#include "communicator/peers.h"

namespace hbm {

class MonitoredBarrier {
 public:
  // `participant` has a prefix of keys for this barrier alone, and `timeout` from now as its
  // deadline. REQUIRES: `peers` outlives the barrier.
  MonitoredBarrier(bootstrap::Participant participant, const Peers& peers,
                   std::chrono::milliseconds timeout);

  // Returns when all ranks have come. Otherwise every rank that has come throws an error that names
  // a missing one: a rank that has died, or has left the group in good order, at once, or one that
  // had not come by the deadline. With `wait_all_ranks` it names all of them, and waits until every
  // rank has come, died or left, or for the deadline. Throws Error(kNetwork) if the store is gone.
  void pass(bool wait_all_ranks) const;

 private:
  // Ranks that will not come any more.
  struct Gone {
    std::vector<int> dead;
    std::vector<int> left;
    bool empty() const noexcept { return dead.empty() && left.empty(); }
  };

  bootstrap::Participant watched(bootstrap::Participant participant) const;
  void decide(bool wait_all_ranks) const;
  void await_verdict() const;
  std::optional<int> await_rank(int rank, bool wait_all_ranks) const;
  void require_needed() const;
  bool has_come(int rank) const;
  KeyValue::Deadline answer_by() const;
  std::string key_of(int rank) const;
  Gone gone_among(const std::vector<int>& ranks) const;
  std::string tell(const Gone& gone) const;

  const bootstrap::Participant participant_;
  const Peers& peers_;
  const std::chrono::milliseconds timeout_;
  const std::string name_;      // of the barrier, as errors have it
  const std::string duration_;  // the timeout: "1000 ms"
};

}  // namespace hbm
