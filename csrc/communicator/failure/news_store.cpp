#include "communicator/failure/news_store.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace hbm::failure {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAnswerPatience{200};   // for the store's answer to a question
constexpr const char* kCount = "count";        // behind left_prefix
constexpr milliseconds kSilentDecision{2000};  // whether a rank had left that has ended

KeyValue::Deadline soon() { return std::chrono::steady_clock::now() + kAnswerPatience; }

}  // namespace

void NewsStore::tend() {
  std::unique_lock lock(mutex_);
  const uint64_t round = ++begun_;
  if (asks_no_more()) {
    to_tell_.clear();
    decide_unanswered(Clock::now(), {});
    done_ = round;
    return;
  }
  lock.unlock();
  // Who has left or ended may have told why before; so the question comes before the news, and what
  // follows from the answer behind them. In the same way this process leaves when all is told.
  std::vector<Answer> answers;
  std::deque<News> to_tell;
  size_t telling = 0;
  bool complete = false;
  std::string trouble;
  try {
    answers = ask_who_left();
    lock.lock();
    to_tell = to_tell_;
    telling = to_tell.size();
    lock.unlock();
    news_.exchange(to_tell, soon(), [this](const News& entry) {
      const std::lock_guard applying(mutex_);
      owner_.apply(entry);
    });
    tell_leaving();
    heed_closing();
    lock.lock();
    for (const Answer& each : answers) {
      if (each.has_left || each.has_ended) {
        owner_.decide(*each.group, each.rank, each.has_left);
      }
    }
    complete = true;
  } catch (const Error& error) {
    // A store that does not answer proves nothing.
    const bool silent = error.kind() == ErrorKind::kTimeout;
    if (!silent) trouble = error.what();
    const auto* const store = dynamic_cast<const StoreError*>(&error);
    const bool removed = store != nullptr && store->was_removed;
    lock.lock();
    if (removed && !std::exchange(was_removed_, true)) {
      log::warn(std::string(error.what()) +
                "; ranks on other nodes may learn of failures by the timeout only");
    }
    const auto ended_before = Clock::now() - (silent ? kSilentDecision : milliseconds(0));
    decide_unanswered(ended_before, answers);
  }
  const auto told = static_cast<std::ptrdiff_t>(telling - to_tell.size());
  to_tell_.erase(to_tell_.begin(), to_tell_.begin() + told);
  if (complete) done_ = round;
  if (!closed_) trouble_ = trouble;
  if (trouble.empty()) answered_ = Clock::now();
}

// Asks for those elsewhere that somebody waits for, and for those that have ended: who had ended
// before the question, and has not left, has died.
std::vector<NewsStore::Answer> NewsStore::ask_who_left() {
  std::vector<Answer> answers;
  std::unique_lock lock(mutex_);
  for (const auto& group : owner_.groups_of(keys_.get())) {
    const bool asks = !group->counted || group->server == StoreServer::kThisProcess;
    if (!group->followed || !asks) continue;
    std::set<int> asked = std::exchange(group->wanted, {});
    for (const auto& [rank, since] : group->undecided) asked.insert(rank);
    for (const int rank : asked) {
      if (group->left.contains(rank) || group->dead.contains(rank)) continue;
      const bool has_ended = group->undecided.contains(rank);
      lock.unlock();
      const bool has_left = group->store->has({group->left_prefix + std::to_string(rank)}, soon());
      lock.lock();
      answers.push_back({group, rank, has_ended, has_left});
    }
  }
  return answers;
}

void NewsStore::tell_leaving() {
  std::erase_if(to_remove_, [this](const auto& group) {
    const bool complete = all_counted(*group);
    if (complete) remove_left(*group);
    return complete;
  });
  std::unique_lock lock(mutex_);
  for (const auto& group : owner_.groups_of(keys_.get())) {
    if (!group->followed || !group->leaving || group->has_left) continue;
    if (!group->counted) {
      lock.unlock();
      group->store->set(group->left_prefix + std::to_string(group->rank), "1", soon());
      count(*group);
      lock.lock();
    }
    if (group->server == StoreServer::kThisProcess && is_last(*group)) {
      lock.unlock();
      const bool complete = all_counted(*group);
      if (complete) remove_left(*group);
      lock.lock();
      if (!complete) {
        if (!std::exchange(group->store_closes, true)) {
          tell({NewsKind::kClosing, group->key, std::to_string(group->rank)});
        }
        continue;
      }
    } else if (group->server == StoreServer::kThisProcess) {
      to_remove_.push_back(group);
    }
    owner_.has_left(*group);
  }
}

// Counts this rank out of the groups whose store is about to end with another rank of them.
void NewsStore::heed_closing() {
  std::unique_lock lock(mutex_);
  for (const auto& group : owner_.groups_of(keys_.get())) {
    if (!group->store_closes || group->server == StoreServer::kThisProcess || group->has_left)
      continue;
    lock.unlock();
    count(*group);
    lock.lock();
    closed_ = true;
    trouble_ = "the rank that served it has left in good order";
  }
}

// REQUIRES: mutex_ is held.
bool NewsStore::asks_no_more() const {
  if (closed_) return true;
  const auto groups = owner_.groups_of(keys_.get());
  return std::ranges::all_of(groups, [](const auto& group) { return group->has_left; });
}

// Returns true if this process has left, or is leaving, all its groups of the store. REQUIRES:
// mutex_ is held.
bool NewsStore::is_last(const MonitoredGroup& group) const {
  const auto groups = owner_.groups_of(keys_.get());
  return std::ranges::all_of(groups, [&](const auto& other) {
    return other.get() == &group || other->has_left || !other->followed;
  });
}

void NewsStore::count(MonitoredGroup& group) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(group.counted, true)) return;
  }
  const long counted = group.store->add(group.left_prefix + kCount, 1, soon());
  // Another rank that serves the store waits for no more than the count.
  const bool is_last_rank = std::cmp_greater_equal(counted, group.processes.size());
  if (is_last_rank && group.server == StoreServer::kNoRank) remove_left(group);
}

// Removes the keys of leaving. REQUIRES: all ranks have counted themselves, or have died, so no
// rank asks for these keys.
void NewsStore::remove_left(const MonitoredGroup& group) {
  std::vector<std::string> keys{group.left_prefix + kCount};
  for (size_t rank = 0; rank < group.processes.size(); ++rank) {
    keys.push_back(group.left_prefix + std::to_string(rank));
  }
  group.store->remove(keys);
}

// Returns true if all ranks of the group have counted themselves, or have died.
bool NewsStore::all_counted(const MonitoredGroup& group) {
  const auto counted = group.store->get(group.left_prefix + kCount, soon());
  const std::lock_guard lock(mutex_);
  return std::stoul(counted.value_or("0")) + group.dead.size() >= group.processes.size();
}

// Takes those for dead that have ended, unless the store has said that they had left. REQUIRES:
// mutex_ is held.
void NewsStore::decide_unanswered(Clock::time_point ended_before,
                                  const std::vector<Answer>& answers) {
  for (const auto& group : owner_.groups_of(keys_.get())) {
    const auto undecided = group->undecided;
    for (const auto& [rank, since] : undecided) {
      if (since > ended_before) continue;
      const auto says_left = [&](const Answer& answer) {
        return answer.group == group && answer.rank == rank && answer.has_left;
      };
      owner_.decide(*group, rank,
                    group->left.contains(rank) || std::ranges::any_of(answers, says_left));
    }
  }
}

}  // namespace hbm::failure
