// The failure detector of a group. Detects the deaths of ranks while the group is being formed.
// Afterwards it reports why an operation can never complete. It watches the ranks on this node by
// their shared memory and pidfds (communicator/shm/shm_group.h), and the ranks on other nodes by
// the failure monitor.
//
// monitored_group.h has the states of a group, and the calls that are legal in each.
//
// Threads: one thread forms the group, up to formed(). Other threads of the group get the detector
// after that, and may call every member of Peers. A forked child cannot reach the monitor of its
// parent: there the monitor's part of an answer is empty, and nothing is published in the store.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "bootstrap/rank_watch.h"
#include "communicator/failure/failure_monitor.h"
#include "communicator/peers.h"
#include "communicator/shm/shm_group.h"
#include "communicator/tuning.h"

namespace hbm::communicator::failure {

class FailureDetector final : public bootstrap::RankWatch, public Peers {
 public:
  // `parting`: the longest wait in leave() and in finish_reports().
  explicit FailureDetector(GroupFacts facts, std::chrono::milliseconds parting = kPartingTimeout);
  ~FailureDetector() override { stop(); }
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  // These calls are made while the group is being formed, in this order. bootstrap::meet() calls
  // the members of RankWatch.

  // Starts to receive reports of second claims: another process has come as one of this group's
  // ranks. Rank 0 also starts to listen for liveness connections, and returns the address, for
  // bootstrap::Member::links. REQUIRES: called while this rank makes its introduction, so that an
  // error of this call reaches the other ranks. Throws std::system_error if no thread can start.
  std::string prepare() { return monitor_.prepare(*group_); }

  void met(int rank, const bootstrap::Member& member) override;
  void await_sight(bootstrap::KeyValue::Deadline deadline) override;
  void check(const std::vector<int>& ranks) override;
  std::string deaths() override;
  void tell_claimed_twice(const std::string& first, const std::string& prefix,
                          const std::vector<std::string>& mailboxes,
                          const std::string& why) noexcept override;

  // Declares that all ranks have met. Stops listening for liveness connections unless this group or
  // another needs the listener.
  void all_met() { monitor_.all_met(*group_); }

  // Declares that the group is formed, under the key prefix `prefix`. `shm_group`: the ranks on
  // this node; null if ranks do not share memory. REQUIRED before every member of Peers except
  // claimed_twice() and stop().
  void formed(const std::string& prefix, std::shared_ptr<shm::ShmGroup> shm_group);

  // Waits until this process has its liveness connection to rank 0, if rank 0 is on another node.
  // Returns also if the connection cannot be made, and then logs one warning.
  void await_connections(bootstrap::KeyValue::Deadline deadline) {
    monitor_.await_connections(*group_, deadline);
  }

  // If all ranks share memory, throws only for a reported failure or a second claim. The operations
  // of such a group are all of communicator/shm, and check their ranks themselves: messages and
  // windows in poll(), collectives in sleep(). They accept a dead rank whose data have come. The
  // queue calls check() after a poll() without progress. A rank may send its data after that
  // poll(), and die before this check(), so check() cannot tell whether the data have come.
  //
  // In a group over several nodes, an operation over MPI does not check single ranks of its node.
  // So there check() also throws for them.
  void check(const progress::Operation& operation) override;
  uint64_t changes() const noexcept override {
    return group_->changes.load(std::memory_order_acquire);
  }
  std::string claimed_twice() const override;
  std::exception_ptr explain(const progress::Operation& operation,
                             const std::exception_ptr& error) override;
  void report_failure(const std::exception& error) override;
  bool group_failed() const override;
  std::vector<int> dead() const override;
  std::vector<int> left(const std::vector<int>& wanted) const override;
  void leave(bool all_came) override;
  void finish_reports() override;
  void stop() override;
  std::string list(const std::vector<int>& ranks) const override;

 private:
  bool asks_monitor() const;
  void check_monitored(const progress::Operation& operation);
  std::exception_ptr with_report(const progress::Operation& operation, const Error& error);
  bool waits_for_local_peer(const progress::Operation& operation) const;

  const ForkGuard fork_;
  const std::chrono::milliseconds parting_;
  FailureMonitor& monitor_;
  const std::shared_ptr<MonitoredGroup> group_;
  // Constant from formed() on.
  std::shared_ptr<shm::ShmGroup> shm_group_;  // null: ranks share no memory
  std::optional<bool> is_monitored_;          // true: some rank does not share this rank's memory
};

}  // namespace hbm::communicator::failure
