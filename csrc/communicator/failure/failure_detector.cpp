#include "communicator/failure/failure_detector.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"
#include "communicator/oversized_message.h"

namespace hbm::failure {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kCausePatience{1500};     // for the cause of an error of MPI's
constexpr milliseconds kSightPatience{700};      // for the sight of a death, with no store to ask
constexpr milliseconds kNeighbourPatience{500};  // for a late neighbour's word of whom it waits for
constexpr milliseconds kSenderPatience{500};     // for the report of who sent an oversized message
constexpr milliseconds kLookEvery{20};
constexpr milliseconds kPartingPatience{1000};

// The ranks of both, ascending.
std::vector<int> united(std::vector<int> ranks, const std::vector<int>& others) {
  ranks.insert(ranks.end(), others.begin(), others.end());
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

FailureDetector::FailureDetector(const bootstrap::Rendezvous& rendezvous,
                                 std::shared_ptr<GroupWatch> watch,
                                 std::shared_ptr<shm::ShmGroup> shm_group)
    : rank_(rendezvous.participant.rank),
      group_(rendezvous.participant.group),
      shm_group_(std::move(shm_group)),
      watch_(std::move(watch)),
      is_followed_((shm_group_ ? shm_group_->size() : 1) < rendezvous.members.size()) {
  for (size_t rank = 0; rank < rendezvous.members.size(); ++rank) {
    names_.push_back(bootstrap::rank_name(static_cast<int>(rank), rendezvous.members[rank]));
  }
  if (is_followed_) watch_->follow(rendezvous.participant.prefix);
  if (rendezvous.members.size() > 1) watch_->heed_claims(rendezvous.participant.prefix);
}

void FailureDetector::check(const Operation& operation) {
  if (const std::string why = watch_->claimed_twice(); !why.empty()) {
    throw Error(ErrorKind::kPeer, group_ + " has failed: " + why);
  }
  if (shm_group_) shm_group_->require_alive(operation.missing(), operation, [] { return false; });
  if (is_followed_) watch_->check(operation);
}

// Whether a rank that is late may itself be waiting, for one on another node.
bool FailureDetector::waits_for_neighbour(const Operation& operation) const {
  if (!shm_group_ || !is_followed_) return false;
  const std::vector<int> missing = operation.missing();
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (std::ranges::count(missing, shm_group_->member(i).rank) > 0) return true;
  }
  return false;
}

std::vector<int> FailureDetector::dead() const {
  std::vector<int> ranks = shm_group_ ? shm_group_->dead() : std::vector<int>();
  return is_followed_ ? united(std::move(ranks), watch_->dead()) : ranks;
}

std::vector<int> FailureDetector::left(const std::vector<int>& wanted) const {
  std::vector<int> ranks = shm_group_ ? shm_group_->left() : std::vector<int>();
  return is_followed_ ? united(std::move(ranks), watch_->left(wanted)) : ranks;
}

// Returns `error` and the group's failure report, if one comes in time: the sender of an
// oversized message mostly knows both operations.
std::exception_ptr FailureDetector::with_report(const Operation& operation, const Error& error) {
  for (const auto end = Clock::now() + kSenderPatience; Clock::now() < end;) {
    try {
      check(operation);
    } catch (const Error& cause) {
      if (cause.kind() != ErrorKind::kPeer) break;
      return std::make_exception_ptr(
          Error(error.kind(), std::string(error.what()) + ". " + cause.what()));
    }
    std::this_thread::sleep_for(kLookEvery);
  }
  return std::make_exception_ptr(Error(error.kind(), error.what()));
}

// MPI's errors are mostly the consequence of a death, which it does not name; and when a neighbour
// is late because it waits for a third rank, its timeout comes at about the same time as ours, and
// knows more.
std::exception_ptr FailureDetector::explain(const Operation& operation,
                                            const std::exception_ptr& error) {
  milliseconds patience = kCausePatience;
  try {
    std::rethrow_exception(error);
  } catch (const OversizedMessage& oversized) {
    return with_report(operation, oversized);
  } catch (const Error& ours) {
    if (ours.kind() == ErrorKind::kTimeout && waits_for_neighbour(operation)) {
      patience = kNeighbourPatience;
    } else if (ours.kind() != ErrorKind::kNetwork) {
      return error;
    }
  } catch (...) {
    return error;
  }
  std::exception_ptr found = error;
  Clock::time_point end = Clock::now() + patience;
  do {
    try {
      check(operation);
    } catch (const Error& cause) {
      if (cause.kind() != ErrorKind::kNetwork) return std::current_exception();
      if (found == error) end = std::min(end, Clock::now() + kSightPatience);
      found = std::current_exception();  // the store is gone
    }
    if (const std::vector<int> ranks = dead(); !ranks.empty()) {
      return std::make_exception_ptr(
          Error(ErrorKind::kDeath, operation.describe() + ": rank " + list(ranks) + " has died"));
    }
    std::this_thread::sleep_for(kLookEvery);
  } while (Clock::now() < end);
  return found;
}

void FailureDetector::report_failure(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const std::string report = "rank " + std::to_string(rank_) + ": " + error.what();
  if (ours != nullptr && ours->kind() == ErrorKind::kPeer) {
    // A report of another rank names that rank. A finding of this rank says "this one".
    const bool is_relayed =
        std::string_view(error.what()).find(" has failed: ") != std::string::npos;
    if (shm_group_) shm_group_->report(is_relayed ? error.what() : report, /*death=*/false);
    return;
  }
  if (shm_group_) shm_group_->report(report, /*death=*/false);
  if (is_followed_) watch_->report(report);
}

bool FailureDetector::group_failed() const {
  return is_followed_ || !shm_group_ || shm_group_->failed();
}

void FailureDetector::leave() {
  if (shm_group_) shm_group_->leave();
  if (is_followed_) watch_->leave(kPartingPatience);
}

void FailureDetector::finish_reports() {
  if (is_followed_) watch_->finish_reports(kPartingPatience);
}

void FailureDetector::stop() { watch_->stop(); }

std::string FailureDetector::list(const std::vector<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    if (!text.empty()) text += ", ";
    text += names_[static_cast<size_t>(rank)];
  }
  return text;
}

}  // namespace hbm::failure
