// A barrier that names the missing ranks. It uses the store, so it can name ranks even when MPI is
// stuck, and it does not change the group.
//
// All ranks get one verdict: the first rank that claims the decision in the store publishes it.
// Rank 0 claims the decision when it knows that all ranks have arrived, or that a rank never will.
// Any rank claims it at its own deadline.
//
// Threads: any; each thread makes and passes its own barrier.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/gather.h"
#include "communicator/peers.h"

namespace hbm::process_group {

class MonitoredBarrier {
 public:
  // Makes the group's `number`-th barrier; the first has number 1. REQUIRES: the deadline of
  // `participant` is `timeout` from now; `peers` outlives the barrier.
  MonitoredBarrier(bootstrap::Participant participant, uint64_t number,
                   const communicator::Peers& peers, std::chrono::milliseconds timeout,
                   bool wait_all_ranks);

  // Returns the keys that a group's `number`-th barrier leaves in the store; none for number 0.
  // Rank 0 removes them when all ranks have arrived at the next barrier.
  static std::vector<std::string> keys_of(const bootstrap::Participant& participant,
                                          uint64_t number);

  // Returns when all ranks have arrived. Otherwise every rank that has arrived throws an error that
  // names a missing rank. A rank that has died, or has destroyed the group, is named immediately. A
  // rank that is late is named at the first deadline of a rank that has arrived. When the late rank
  // arrives, it throws the same error immediately. The error is Error(kDeath) if a missing rank has
  // died, else Error(kTimeout) if one is late, else Error(kPeer).
  //
  // With wait_all_ranks the error names all missing ranks, and rank 0 waits until every rank has
  // arrived, died or left, at most until the deadline. Throws Error(kNetwork) if the store is gone,
  // Error(kTimeout) if the store does not answer by the deadline, or within a second if that is
  // later.
  void pass() const;

 private:
  // Ranks that will never arrive.
  struct Gone {
    std::vector<int> dead;
    std::vector<int> left;
    bool empty() const noexcept { return dead.empty() && left.empty(); }
  };

  struct Verdict {
    std::vector<int> missing;  // empty: all have arrived
    ErrorKind kind = ErrorKind::kTimeout;
    std::string cause;

    // Returns the verdict as a value in the store, which parse() reads.
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
  bool has_arrived(int rank) const;
  bootstrap::KeyValue::Deadline answer_by() const;
  std::string key_of(int rank) const;
  std::string verdict_key() const;
  Gone gone_among(const std::vector<int>& ranks) const;
  std::string describe(const Gone& gone) const;

  const std::vector<std::string> previous_;  // the keys of the previous barrier
  const bootstrap::Participant participant_;
  const communicator::Peers& peers_;
  const std::chrono::milliseconds timeout_;
  const bool wait_all_ranks_;
  const std::string name_;      // of the barrier, for errors
  const std::string duration_;  // the timeout: "1000 ms"
};

}  // namespace hbm::process_group
