// One group's view of the failure monitor: while the group is being made, and afterwards where its
// ranks do not all share memory.
//
// Threads: every member may be called from any thread. In a forked child, whose parent's the group
// is, nothing is learnt or told.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "bootstrap/rank_watch.h"
#include "communicator/failure/failure_monitor.h"
#include "progress/operation.h"

namespace hbm::failure {

class GroupWatch final : public bootstrap::RankWatch {
 public:
  explicit GroupWatch(WatchSetup setup);
  ~GroupWatch() override { stop(); }
  GroupWatch(const GroupWatch&) = delete;
  GroupWatch& operator=(const GroupWatch&) = delete;

  void met(int rank, const bootstrap::Member& member) override;
  void await_sight(KeyValue::Deadline deadline) override;
  void check(const std::vector<int>& ranks) override;
  std::string deaths() override;

  void tell_claimed_twice(const std::string& first, const std::string& prefix,
                          const std::vector<std::string>& mailboxes,
                          const std::string& why) noexcept override;

  // Begins to take links, and returns where, for bootstrap::Member::links. Rank 0 does.
  std::string listen();

  // All ranks have been met: takes no links any more if no group has any on another node.
  void all_met();

  // Waits for the link to rank 0, if that is on another node.
  void await_links(KeyValue::Deadline deadline);

  // The group has been made, under `prefix` of keys. Those below REQUIRE it.
  void follow(const std::string& prefix);

  // Makes heed_claims() possible. Called while a failure still reaches the other ranks. Throws
  // std::system_error if no thread is left.
  void await_claims();

  // The group has been made, under `prefix` of keys: hears of second claims from now on.
  void heed_claims(const std::string& prefix);

  // Returns how another process came as a rank of the group; empty: none is known to.
  std::string claimed_twice() const;

  // Throws Error(kDeath), Error(kPeer) or Error(kNetwork) if the operation can never complete.
  void check(const Operation& operation);

  // Tells all of a failure. The process may end soon after, so this waits a moment (200 ms at most)
  // for the store to have it.
  void report(const std::string& failure);

  // Ranks that have died.
  std::vector<int> dead() const;

  // Ranks that have left in good order, as far as it is known; those of `wanted` are asked for.
  std::vector<int> left(const std::vector<int>& wanted) const;

  // Tells all that this rank has left in good order; waits until that is in the store, or
  // `patience` is over.
  void leave(std::chrono::milliseconds patience);

  // Waits until the store has all that was reported, or `patience` is over, or the store is gone.
  void finish_reports(std::chrono::milliseconds patience);

  // Idempotent.
  void stop();

 private:
  const ForkGuard fork_;
  FailureMonitor& monitor_;
  const std::shared_ptr<MonitoredGroup> group_;
};

}  // namespace hbm::failure
