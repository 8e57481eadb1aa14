#include "communicator/failure/failure_detector.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "base/log.h"
#include "communicator/failure/tuning.h"
#include "communicator/oversized_message.h"

namespace hbm::communicator::failure {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Returns the ranks of both lists, ascending, each once.
std::vector<int> united(std::vector<int> ranks, const std::set<int>& others) {
  ranks.insert(ranks.end(), others.begin(), others.end());
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::string deaths_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name + " has died";
  return text;
}

}  // namespace

FailureDetector::FailureDetector(GroupFacts facts, milliseconds parting)
    : parting_(parting),
      monitor_(FailureMonitor::here()),
      group_(std::make_shared<MonitoredGroup>(std::move(facts))) {
  monitor_.add(group_);
}

void FailureDetector::met(int rank, const bootstrap::Member& member) {
  monitor_.meet(*group_, rank, member);
}

void FailureDetector::await_sight(bootstrap::KeyValue::Deadline deadline) {
  monitor_.await_greeting(*group_, deadline);
}

void FailureDetector::check(const std::vector<int>& ranks) {
  if (fork_.in_child()) return;
  if (monitor_.ended(*group_, ranks).empty()) return;
  // The dead rank may have ended because a rank on another node died first, and may have published
  // that death. So the failure log is read before the error names the dead ranks.
  monitor_.await_published(*group_, kReportPublishTimeout);
  throw Error(ErrorKind::kDeath,
              group_->name + " cannot be made: " + deaths_of(monitor_.ended(*group_, ranks)));
}

std::string FailureDetector::deaths() {
  if (fork_.in_child()) return {};
  std::vector<std::string> dead;
  for (const auto end = Clock::now() + kDeathProofTimeout; dead.empty() && Clock::now() < end;) {
    dead = monitor_.ended();
    if (dead.empty()) std::this_thread::sleep_for(kDeathProofCheckPeriod);
  }
  return dead.empty() ? std::string() : ". Meanwhile " + deaths_of(dead);
}

void FailureDetector::tell_claimed_twice(const std::string& first, const std::string& prefix,
                                         const std::vector<std::string>& mailboxes,
                                         const std::string& why) noexcept {
  try {
    monitor_.tell_claimed_twice(*group_, log_key(first, prefix, group_->name), mailboxes, why,
                                kReportPublishTimeout);
  } catch (const std::exception& error) {  // no thread or memory is left
    log::warn(std::string("cannot tell a group of a second claim: ") + error.what());
  }
}

void FailureDetector::formed(const std::string& prefix, std::shared_ptr<shm::ShmGroup> shm_group) {
  const bool is_monitored = (shm_group ? shm_group->size() : 1) < group_->processes.size();
  std::function<void()> wake_sleepers;
  if (shm_group) {
    wake_sleepers = [shm_group] { shm_group->wake_for_end(); };
    shm_group->on_death([this_group = std::weak_ptr(group_), &monitor = monitor_](int rank) {
      if (const auto group = this_group.lock()) monitor.note_end(*group, rank);
    });
  }
  monitor_.formed(*group_, prefix, is_monitored, std::move(wake_sleepers));
  shm_group_ = std::move(shm_group);
  is_monitored_ = is_monitored;
}

// Returns true if some rank does not share this rank's memory. Only the monitor knows whether such
// a rank lives. Returns false in a forked child. Throws std::logic_error before formed().
bool FailureDetector::asks_monitor() const {
  if (!is_monitored_)
    throw std::logic_error(group_->name + " is asked for its ranks before formed()");
  return *is_monitored_ && !fork_.in_child();
}

std::string FailureDetector::claimed_twice() const {
  if (!group_->has_second_claim.load(std::memory_order_acquire) || fork_.in_child()) return {};
  return group_->claimed_twice;
}

void FailureDetector::check(const progress::Operation& operation) {
  if (const std::string why = claimed_twice(); !why.empty()) {
    throw Error(ErrorKind::kPeer, group_->name + " has failed: " + why);
  }
  if (!asks_monitor()) {
    if (shm_group_) shm_group_->require_no_report();
    return;
  }
  if (shm_group_) shm_group_->require_alive(operation.missing(), operation, [] { return false; });
  check_monitored(operation);
}

void FailureDetector::check_monitored(const progress::Operation& operation) {
  const std::vector<int> missing = operation.missing();
  const Findings found = monitor_.findings(*group_, missing);
  // Checks for a reported failure first, then for deaths, then for ranks that have left. A rank
  // that fails or detects a death ends or leaves afterwards, and the error must name the cause.
  if (found.failure) {
    throw Error(ErrorKind::kPeer, group_->name + " has failed: " + *found.failure);
  }
  const std::vector<int> needed = operation.needed();
  for (const int rank : needed) {
    if (!found.dead.contains(rank)) continue;
    throw Error(ErrorKind::kDeath, operation.describe() + ": " + group_->named(rank) + " has died");
  }
  for (const int rank : missing) {
    if (!found.left.contains(rank)) continue;
    throw Error(ErrorKind::kPeer, operation.describe() + ": " + group_->name +
                                      " was destroyed on a rank that this one waits for, " +
                                      group_->named(rank));
  }
  for (const int rank : needed) {
    if (const auto silent = found.silent.find(rank); silent != found.silent.end()) {
      throw Error(ErrorKind::kNetwork,
                  operation.describe() + ": " + silence_text(group_->named(rank), silent->second));
    }
  }
  if (found.store_trouble.empty()) return;
  throw Error(ErrorKind::kNetwork,
              operation.describe() +
                  ": the store is gone, and with it the reports of other nodes' failures (" +
                  found.store_trouble + ")");
}

// Returns true if a late rank of this node may itself wait for a rank on another node.
bool FailureDetector::waits_for_local_peer(const progress::Operation& operation) const {
  if (!shm_group_ || !asks_monitor()) return false;
  const std::vector<int> missing = operation.missing();
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (std::ranges::count(missing, shm_group_->local_rank(i).group_rank) > 0) return true;
  }
  return false;
}

std::vector<int> FailureDetector::dead() const {
  std::vector<int> ranks = shm_group_ ? shm_group_->dead() : std::vector<int>();
  if (!asks_monitor()) return ranks;
  for (const int rank : ranks) monitor_.note_end(*group_, rank);
  return united(std::move(ranks), monitor_.findings(*group_, {}).dead);
}

std::vector<int> FailureDetector::left(const std::vector<int>& wanted) const {
  std::vector<int> ranks = shm_group_ ? shm_group_->left() : std::vector<int>();
  if (!asks_monitor()) return ranks;
  return united(std::move(ranks), monitor_.findings(*group_, wanted).left);
}

// Returns `error`, with the group's failure report in its text if a report comes in time. The
// sender of an oversized message mostly knows both operations, and reports them.
std::exception_ptr FailureDetector::with_report(const progress::Operation& operation,
                                                const Error& error) {
  for (const auto end = Clock::now() + kSenderReportTimeout; Clock::now() < end;) {
    try {
      check(operation);
    } catch (const Error& cause) {
      if (cause.kind() != ErrorKind::kPeer) break;
      return std::make_exception_ptr(
          Error(error.kind(), std::string(error.what()) + ". " + cause.what()));
    }
    std::this_thread::sleep_for(kCauseCheckPeriod);
  }
  return std::make_exception_ptr(Error(error.kind(), error.what()));
}

// Waits for an error that names the cause. An error of MPI mostly follows from a death, which MPI
// does not name. After a timeout, the late local peer may itself have waited for a third rank. The
// peer then fails at about the same time as this rank, and its report names the third rank.
std::exception_ptr FailureDetector::explain(const progress::Operation& operation,
                                            const std::exception_ptr& error) {
  milliseconds timeout = kCauseTimeout;
  try {
    std::rethrow_exception(error);
  } catch (const OversizedMessage& oversized) {
    return with_report(operation, oversized);
  } catch (const Error& ours) {
    if (ours.kind() == ErrorKind::kTimeout && waits_for_local_peer(operation)) {
      timeout = kLocalPeerReportTimeout;
    } else if (ours.kind() != ErrorKind::kNetwork) {
      return error;
    }
  } catch (...) {
    return error;
  }
  std::exception_ptr found = error;
  Clock::time_point end = Clock::now() + timeout;
  do {
    try {
      check(operation);
    } catch (const Error& cause) {
      if (cause.kind() != ErrorKind::kNetwork) return std::current_exception();
      if (found == error) end = std::min(end, Clock::now() + kDeathSightTimeout);
      found = std::current_exception();  // the store is gone, or a machine is silent
    }
    if (const std::vector<int> ranks = dead(); !ranks.empty()) {
      return std::make_exception_ptr(
          Error(ErrorKind::kDeath, operation.describe() + ": rank " + list(ranks) + " has died"));
    }
    std::this_thread::sleep_for(kCauseCheckPeriod);
  } while (Clock::now() < end);
  return found;
}

void FailureDetector::report_failure(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const std::string report = "rank " + std::to_string(group_->rank) + ": " + error.what();
  if (ours != nullptr && ours->kind() == ErrorKind::kPeer) {
    // The text of another rank's report names that rank. The text of an error that this rank found
    // may call this rank "this one", so the report begins with the number of this rank.
    const bool is_relayed =
        std::string_view(error.what()).find(" has failed: ") != std::string::npos;
    if (shm_group_) shm_group_->report(is_relayed ? error.what() : report, /*death=*/false);
    return;
  }
  if (shm_group_) shm_group_->report(report, /*death=*/false);
  if (asks_monitor()) monitor_.report(*group_, report, kReportPublishTimeout);
}

bool FailureDetector::group_failed() const {
  return asks_monitor() || !shm_group_ || shm_group_->failed();
}

void FailureDetector::leave(bool all_came) {
  const bool tells_others = asks_monitor();
  if (shm_group_) shm_group_->leave();
  const bool is_patient = all_came && group_->server != bootstrap::StoreServer::kNoRank;
  if (tells_others && !monitor_.leave(*group_, is_patient ? kSlowStoreTimeout : parting_)) {
    log::info("cannot tell the other ranks of leaving " + group_->name);
  }
}

void FailureDetector::finish_reports() {
  if (!asks_monitor() || monitor_.finish_publishing(*group_, parting_)) return;
  log::info("cannot tell the other ranks why " + group_->name + " has failed");
}

void FailureDetector::stop() {
  if (!fork_.in_child()) monitor_.remove(group_);
}

std::string FailureDetector::list(const std::vector<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    if (!text.empty()) text += ", ";
    text += group_->names[static_cast<size_t>(rank)];
  }
  return text;
}

}  // namespace hbm::communicator::failure
