// The failure detector of a group: of the ranks on this node by their shared memory and pidfds
// (communicator/shm/shm_group.h), of those on other nodes by what the failure monitor knows
// (GroupWatch).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/rendezvous.h"
#include "communicator/failure/group_watch.h"
#include "communicator/peers.h"
#include "communicator/shm/shm_group.h"

namespace hbm::failure {

class FailureDetector final : public Peers {
 public:
  // `watch` has met all ranks of the rendezvous; `shm_group` is that of the ranks on this node,
  // null where ranks do not share memory.
  FailureDetector(const bootstrap::Rendezvous& rendezvous, std::shared_ptr<GroupWatch> watch,
                  std::shared_ptr<shm::ShmGroup> shm_group);

  void check(const Operation& operation) override;
  std::string claimed_twice() const override { return watch_->claimed_twice(); }
  std::exception_ptr explain(const Operation& operation, const std::exception_ptr& error) override;
  void report_failure(const std::exception& error) override;
  bool group_failed() const override;
  std::vector<int> dead() const override;
  std::vector<int> left(const std::vector<int>& wanted) const override;
  void leave() override;
  void finish_reports() override;
  void stop() override;
  std::string list(const std::vector<int>& ranks) const override;

 private:
  std::exception_ptr with_report(const Operation& operation, const Error& error);
  bool waits_for_neighbour(const Operation& operation) const;

  const int rank_;
  const std::string group_;
  std::vector<std::string> names_;                  // by rank: "3 (pid 4711 on host)"
  const std::shared_ptr<shm::ShmGroup> shm_group_;  // null: ranks share no memory
  const std::shared_ptr<GroupWatch> watch_;
  const bool is_followed_;  // some rank does not share this one's memory
};

}  // namespace hbm::failure
