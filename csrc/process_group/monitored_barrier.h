// A barrier that names the ranks that do not come. It goes over the store, so that it can tell who
// is missing even when MPI is stuck, and it leaves the group as it is.
//
// The ranks agree on one verdict, since the store orders the claims to give it. Rank 0 claims when
// all others have come, and each rank claims at its own deadline.
//
// Threads: any; each passes a barrier of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/gather.h"
#include "communicator/peers.h"

namespace hbm {

class MonitoredBarrier {
 public:
  // The group's `number`-th, from 1. `participant` has `timeout` from now as its deadline.
  // REQUIRES: `peers` outlives the barrier.
  MonitoredBarrier(bootstrap::Participant participant, uint64_t number, const Peers& peers,
                   std::chrono::milliseconds timeout, bool wait_all_ranks);

  // Returns the keys that a group's `number`-th barrier leaves in the store; of 0: none. Rank 0
  // removes them when all ranks have come to the next one.
  static std::vector<std::string> keys_of(const bootstrap::Participant& participant,
                                          uint64_t number);

  // Returns when all ranks have come. Otherwise every rank that has come throws an error that names
  // a missing one: a rank that has died, or has left the group in good order, immediately, or one
  // that had not come by the first deadline of a rank that has come. A rank that comes later throws
  // the same immediately. With wait_all_ranks the error names all of them, and rank 0 waits until
  // every rank has come, died or left, or for the deadline. Throws Error(kNetwork) if the store is
  // gone, Error(kTimeout) if it does not answer by the deadline (at least a second).
  void pass() const;

 private:
  // Ranks that will not come any more.
  struct Gone {
    std::vector<int> dead;
    std::vector<int> left;
    bool empty() const noexcept { return dead.empty() && left.empty(); }
  };

  struct Verdict {
    std::vector<int> missing;  // empty: all have come
    ErrorKind kind = ErrorKind::kTimeout;
    std::string cause;

    // The form in which the store has it.
    std::string record() const;
    static Verdict parse(const std::string& record);
  };

  bootstrap::Participant watched(bootstrap::Participant participant, uint64_t number) const;
  Verdict decide() const;
  Verdict await_verdict() const;
  Verdict verdict_on(std::vector<int> missing) const;
  Verdict publish(Verdict own) const;
  Verdict await_publication(int decider) const;
  std::string words_of_rank_0(const Verdict& verdict) const;
  std::optional<int> await_rank(int rank) const;
  void require_needed() const;
  void require_present(const std::vector<int>& ranks) const;
  bool has_come(int rank) const;
  KeyValue::Deadline answer_by() const;
  std::string key_of(int rank) const;
  std::string verdict_key() const;
  Gone gone_among(const std::vector<int>& ranks) const;
  std::string tell(const Gone& gone) const;

  const std::vector<std::string> previous_;  // the keys of the barrier before
  const bootstrap::Participant participant_;
  const Peers& peers_;
  const std::chrono::milliseconds timeout_;
  const bool wait_all_ranks_;
  const std::string name_;      // of the barrier, as errors have it
  const std::string duration_;  // the timeout: "1000 ms"
};

}  // namespace hbm
