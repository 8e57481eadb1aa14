// The failure monitor's round at a store: it asks which ranks have left, exchanges entries of the
// failure log, and publishes that this process leaves groups.
//
// Closing: a store ends with the process that serves it. Each later question to the store fails,
// and PyTorch's client prints a message for it. So when the serving rank leaves its last group of
// the store, it publishes an entry. Then it waits until the other ranks have counted themselves,
// that is, have added 1 to a key of the group. A rank counts itself when it leaves the group, or
// when it reads the entry. A counted rank asks the store no more about this group.
//
// A distant store: an answer takes a round trip of the link. If it comes too late, it is lost, so
// the next round waits twice as long for each answer, up to kLongestRoundAnswerTimeout.
//
// A lost store: if a question fails, the store is mostly gone for ever, because its server has
// died. PyTorch's client then prints a stack trace for each question. So each failed question
// doubles the pause before the next one.
//
// Keys: once all ranks of a group have counted themselves, the serving rank removes the group's
// keys below left_prefix. If no rank serves the store, the rank that counts itself last removes
// them.
//
// Locks: only the monitor's thread runs this. It never holds mutex_ while it asks the store, and
// takes mutex_ between two questions. If another thread adds entries during a round, the next round
// publishes them.

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "communicator/failure/failure_monitor.h"
#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {
namespace {

using std::chrono::milliseconds;

constexpr const char* kCount = "count";  // appended to left_prefix

bootstrap::KeyValue::Deadline after(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

}  // namespace

void FailureMonitor::tend(JobStore& store) {
  std::unique_lock lock(mutex_);
  const uint64_t round = ++store.begun;
  if (asks_no_more(store)) {
    store.to_publish.clear();
    decide_unanswered(store, Clock::now(), {});
    store.done = round;
    return;
  }
  if (Clock::now() < store.asks_again) return decide_unanswered(store, Clock::now(), {});
  lock.unlock();
  // Order matters: ask who left, read the failure log, decide. A rank that has left because of a
  // failure has published this failure before it left, so the log has it by now. For the same
  // reason this process publishes its own entries first, and then leaves.
  std::vector<Answer> answers;
  std::deque<FailureEntry> to_publish;
  size_t publishing = 0;
  bool complete = false;
  std::string trouble;
  try {
    answers = ask_who_left(store);
    lock.lock();
    to_publish = store.to_publish;
    publishing = to_publish.size();
    lock.unlock();
    store.log.exchange(to_publish, store.answer_time, [this](const FailureEntry& entry) {
      const std::lock_guard applying(mutex_);
      apply(entry);
    });
    publish_leaving(store);
    heed_closing(store);
    lock.lock();
    for (const Answer& each : answers) {
      if (each.has_left || each.has_ended) {
        decide(*each.group, each.rank, each.has_left);
      }
    }
    complete = true;
  } catch (const Error& error) {
    // A store that does not answer in time proves no death.
    const bool silent = error.kind() == ErrorKind::kTimeout;
    if (!silent) trouble = error.what();
    const auto* const of_store = dynamic_cast<const bootstrap::StoreError*>(&error);
    const bool removed = of_store != nullptr && of_store->was_removed;
    lock.lock();
    if (removed && !std::exchange(store.was_removed, true)) {
      log::warn(std::string(error.what()) +
                "; ranks on other nodes may learn of failures by the timeout only");
    }
    const auto ended_before = Clock::now() - (silent ? kSilentStoreDeathDelay : milliseconds(0));
    decide_unanswered(store, ended_before, answers);
    if (silent) {
      store.answer_time = std::min(2 * store.answer_time, kLongestRoundAnswerTimeout);
    } else {
      store.pause = std::clamp(2 * store.pause, kFirstLostStorePause, kLongestLostStorePause);
      store.asks_again = Clock::now() + store.pause;
    }
  }
  const auto published = static_cast<std::ptrdiff_t>(publishing - to_publish.size());
  store.to_publish.erase(store.to_publish.begin(), store.to_publish.begin() + published);
  if (complete) {
    store.done = round;
    store.pause = milliseconds(0);
  }
  if (!store.closed) store.trouble = trouble;
  if (trouble.empty()) store.answered = Clock::now();
}

// Asks the store whether ranks have left: ranks that an operation waits for, and ranks whose
// process has ended. A rank that had ended before the question, and has not left, has died.
std::vector<FailureMonitor::Answer> FailureMonitor::ask_who_left(const JobStore& store) {
  std::vector<Answer> answers;
  std::unique_lock lock(mutex_);
  for (const auto& group : groups_of(store)) {
    const bool asks = !group->counted || group->server == bootstrap::StoreServer::kThisProcess;
    if (!group->is_monitored() || !asks) continue;
    std::set<int> asked = std::exchange(group->wanted, {});
    for (const auto& [rank, since] : group->undecided) asked.insert(rank);
    for (const int rank : asked) {
      if (group->left.contains(rank) || group->dead.contains(rank)) continue;
      const bool has_ended = group->undecided.contains(rank);
      lock.unlock();
      const bool has_left =
          group->store->has({group->left_prefix + std::to_string(rank)}, after(store.answer_time));
      lock.lock();
      answers.push_back({group, rank, has_ended, has_left});
    }
  }
  return answers;
}

void FailureMonitor::publish_leaving(JobStore& store) {
  std::erase_if(store.to_remove, [&](const auto& group) {
    const bool complete = all_counted(store, *group);
    if (complete) remove_left(*group);
    return complete;
  });
  std::unique_lock lock(mutex_);
  for (const auto& group : groups_of(store)) {
    if (group->state != GroupState::kLeaving) continue;
    if (!group->counted) {
      lock.unlock();
      group->store->set(group->left_prefix + std::to_string(group->rank), "1",
                        after(store.answer_time));
      count(store, *group);
      lock.lock();
    }
    if (group->server == bootstrap::StoreServer::kThisProcess && is_last(store, *group)) {
      lock.unlock();
      const bool complete = all_counted(store, *group);
      if (complete) remove_left(*group);
      lock.lock();
      if (!complete) {
        if (!std::exchange(group->store_closes, true)) {
          store.to_publish.push_back(
              {FailureKind::kClosing, group->key, std::to_string(group->rank)});
        }
        continue;
      }
    } else if (group->server == bootstrap::StoreServer::kThisProcess) {
      store.to_remove.push_back(group);
    }
    if (group->state != GroupState::kLeaving) continue;  // remove() was called during count()
    group->state = GroupState::kLeft;
    changed_.notify_all();
  }
}

// Counts this rank in each group whose serving rank has published that it leaves. This process then
// asks the store no more.
void FailureMonitor::heed_closing(JobStore& store) {
  std::unique_lock lock(mutex_);
  for (const auto& group : groups_of(store)) {
    const bool closes =
        group->store_closes && group->server != bootstrap::StoreServer::kThisProcess;
    if (!closes || group->state == GroupState::kLeft) continue;
    lock.unlock();
    count(store, *group);
    lock.lock();
    store.closed = true;
    store.trouble = "the rank that served it has left in good order";
  }
}

// REQUIRES: mutex_ is held.
std::vector<std::shared_ptr<MonitoredGroup>> FailureMonitor::groups_of(
    const JobStore& store) const {
  std::vector<std::shared_ptr<MonitoredGroup>> found;
  for (const auto& group : groups_) {
    if (group->job_store.get() == store.keys) found.push_back(group);
  }
  return found;
}

// REQUIRES: mutex_ is held.
bool FailureMonitor::asks_no_more(const JobStore& store) const {
  if (store.closed) return true;
  const auto groups = groups_of(store);
  return std::ranges::all_of(groups,
                             [](const auto& group) { return group->state == GroupState::kLeft; });
}

// Returns true if this process has left all its other monitored groups that use the store.
// REQUIRES: mutex_ is held.
bool FailureMonitor::is_last(const JobStore& store, const MonitoredGroup& group) const {
  const auto groups = groups_of(store);
  return std::ranges::all_of(groups, [&](const auto& other) {
    return other.get() == &group || other->state == GroupState::kLeft || !other->is_monitored();
  });
}

void FailureMonitor::count(const JobStore& store, MonitoredGroup& group) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(group.counted, true)) return;
  }
  long counted = 0;
  try {
    counted = group.store->add(group.left_prefix + kCount, 1, after(store.answer_time));
  } catch (const bootstrap::StoreError& error) {
    const std::lock_guard lock(mutex_);
    group.counted = !error.never_asked;  // the next round repeats only an addition that is not made
    throw;
  }
  // If a rank serves the store, that rank removes the keys (publish_leaving()).
  const bool is_last_rank = std::cmp_greater_equal(counted, group.processes.size());
  if (is_last_rank && group.server == bootstrap::StoreServer::kNoRank) remove_left(group);
}

// Removes the keys below left_prefix. REQUIRES: all ranks have counted themselves, or have died, so
// no rank asks for these keys.
void FailureMonitor::remove_left(const MonitoredGroup& group) {
  std::vector<std::string> keys{group.left_prefix + kCount};
  for (size_t rank = 0; rank < group.processes.size(); ++rank) {
    keys.push_back(group.left_prefix + std::to_string(rank));
  }
  group.store->remove(keys);
}

// Returns true if all ranks of the group have counted themselves, or have died.
bool FailureMonitor::all_counted(const JobStore& store, const MonitoredGroup& group) {
  const auto counted = group.store->get(group.left_prefix + kCount, after(store.answer_time));
  const std::lock_guard lock(mutex_);
  return std::stoul(counted.value_or("0")) + group.dead.size() >= group.processes.size();
}

// Decides about the ranks whose process had ended by `ended_before`: they have left if the store
// says so, and have died otherwise. REQUIRES: mutex_ is held.
void FailureMonitor::decide_unanswered(const JobStore& store, Clock::time_point ended_before,
                                       const std::vector<Answer>& answers) {
  for (const auto& group : groups_of(store)) {
    const auto undecided = group->undecided;
    for (const auto& [rank, since] : undecided) {
      if (since > ended_before) continue;
      const auto says_left = [&](const Answer& answer) {
        return answer.group == group && answer.rank == rank && answer.has_left;
      };
      decide(*group, rank, group->left.contains(rank) || std::ranges::any_of(answers, says_left));
    }
  }
}

// Marks a rank as left if `has_left` is true, else as dead. REQUIRES: mutex_ is held.
void FailureMonitor::decide(MonitoredGroup& group, int rank, bool has_left) {
  group.undecided.erase(rank);
  const bool is_new = (has_left ? group.left : group.dead).insert(rank).second;
  group.changes.fetch_add(1, std::memory_order_release);
  if (is_new && !has_left) publish_death(group, rank);
}

// Applies an entry of the failure log. REQUIRES: mutex_ is held.
void FailureMonitor::apply(const FailureEntry& entry) {
  if (entry.kind == FailureKind::kDeath) {
    published_.insert(entry.about);
    mark_ended(entry.about);
    return;
  }
  if (entry.kind == FailureKind::kClaimedTwice) {
    claimed_twice_.emplace(entry.about, entry.text);
    apply_second_claim(entry.about, entry.text);
    return;
  }
  for (const auto& group : groups_) {
    if (group->key != entry.about) continue;
    if (entry.kind == FailureKind::kFailure) {
      group->failure = entry.text;
    } else if (const int rank = std::stoi(entry.text); rank != group->rank) {
      group->left.insert(rank);
      group->store_closes = true;
    }
    group->changes.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace hbm::communicator::failure
