#include "communicator/failure/group_watch.h"

#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace hbm::failure {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kReportPatience{200};
constexpr milliseconds kProofPatience{300};  // from the end of a connection to that of its process
constexpr milliseconds kLookEvery{10};

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name + " has died";
  return text;
}

}  // namespace

GroupWatch::GroupWatch(WatchSetup setup)
    : monitor_(FailureMonitor::here()), group_(std::make_shared<MonitoredGroup>(std::move(setup))) {
  monitor_.add(group_);
}

void GroupWatch::met(int rank, const bootstrap::Member& member) {
  if (!fork_.in_child()) monitor_.meet(*group_, rank, member);
}

void GroupWatch::await_sight(KeyValue::Deadline deadline) {
  if (!fork_.in_child()) monitor_.await_greeting(*group_, deadline);
}

std::string GroupWatch::listen() { return fork_.in_child() ? "" : monitor_.listen(*group_); }

void GroupWatch::all_met() {
  if (!fork_.in_child()) monitor_.all_met(*group_);
}

void GroupWatch::check(const std::vector<int>& ranks) {
  if (fork_.in_child()) return;
  if (monitor_.ended(*group_, ranks).empty()) return;
  // The first to die may have been another, on another node, whom this one had seen.
  monitor_.await_published(*group_, kReportPatience);
  throw Error(ErrorKind::kDeath,
              group_->name + " cannot be made: " + list(monitor_.ended(*group_, ranks)));
}

std::string GroupWatch::deaths() {
  if (fork_.in_child()) return {};
  std::vector<std::string> dead;
  for (const auto end = Clock::now() + kProofPatience; dead.empty() && Clock::now() < end;) {
    dead = monitor_.ended();
    if (dead.empty()) std::this_thread::sleep_for(kLookEvery);
  }
  return dead.empty() ? std::string() : ". Meanwhile " + list(dead);
}

void GroupWatch::await_links(KeyValue::Deadline deadline) {
  if (!fork_.in_child()) monitor_.await_links(*group_, deadline);
}

void GroupWatch::follow(const std::string& prefix) {
  if (!fork_.in_child()) monitor_.follow(*group_, prefix);
}

void GroupWatch::tell_claimed_twice(const std::string& first, const std::string& prefix,
                                    const std::vector<std::string>& mailboxes,
                                    const std::string& why) noexcept {
  if (fork_.in_child()) return;
  try {
    monitor_.tell_claimed_twice(*group_, log_key(first, prefix, group_->name), mailboxes, why,
                                kReportPatience);
  } catch (const std::exception& error) {  // no thread or memory is left
    log::warn(std::string("cannot tell a group of a second claim: ") + error.what());
  }
}

void GroupWatch::await_claims() {
  if (!fork_.in_child()) monitor_.await_claims();
}

void GroupWatch::heed_claims(const std::string& prefix) {
  if (!fork_.in_child()) monitor_.heed_claims(*group_, prefix);
}

std::string GroupWatch::claimed_twice() const {
  if (!group_->has_second_claim.load(std::memory_order_acquire) || fork_.in_child()) return {};
  return monitor_.claimed_twice(*group_);
}

void GroupWatch::check(const Operation& operation) {
  if (fork_.in_child()) return;
  const std::vector<int> missing = operation.missing();
  const Findings found = monitor_.look(*group_, missing);
  // The cause before what follows from it: who has failed or met a death ends or leaves.
  if (found.failure) {
    throw Error(ErrorKind::kPeer, group_->name + " has failed: " + *found.failure);
  }
  const std::vector<int> needed = operation.needed();
  for (const int rank : needed) {
    if (!found.dead.contains(rank)) continue;
    throw Error(ErrorKind::kDeath, operation.describe() + ": " +
                                       group_->ranks[static_cast<size_t>(rank)] + " has died");
  }
  for (const int rank : missing) {
    const std::string& name = group_->ranks[static_cast<size_t>(rank)];
    if (found.left.contains(rank)) {
      throw Error(ErrorKind::kPeer, operation.describe() + ": " + group_->name +
                                        " was destroyed on a rank that this one waits for, " +
                                        name);
    }
  }
  for (const int rank : needed) {
    const std::string& name = group_->ranks[static_cast<size_t>(rank)];
    if (const auto silent = found.silent.find(rank); silent != found.silent.end()) {
      throw Error(ErrorKind::kNetwork,
                  operation.describe() + ": " + silence_text(name, silent->second));
    }
  }
  if (found.store_trouble.empty()) return;
  throw Error(ErrorKind::kNetwork,
              operation.describe() +
                  ": the store is gone, and with it the reports of other nodes' failures (" +
                  found.store_trouble + ")");
}

void GroupWatch::report(const std::string& failure) {
  if (!fork_.in_child()) monitor_.report(*group_, failure, kReportPatience);
}

std::vector<int> GroupWatch::dead() const {
  if (fork_.in_child()) return {};
  const std::set<int> dead = monitor_.look(*group_, {}).dead;
  return {dead.begin(), dead.end()};
}

std::vector<int> GroupWatch::left(const std::vector<int>& wanted) const {
  if (fork_.in_child()) return {};
  const std::set<int> left = monitor_.look(*group_, wanted).left;
  return {left.begin(), left.end()};
}

void GroupWatch::leave(milliseconds patience) {
  if (fork_.in_child() || monitor_.leave(*group_, patience)) return;
  log::info("cannot tell the other ranks of leaving " + group_->name);
}

void GroupWatch::finish_reports(milliseconds patience) {
  if (fork_.in_child() || monitor_.finish_publishing(*group_, patience)) return;
  log::info("cannot tell the other ranks why " + group_->name + " has failed");
}

void GroupWatch::stop() {
  if (!fork_.in_child()) monitor_.remove(group_);
}

}  // namespace hbm::failure
