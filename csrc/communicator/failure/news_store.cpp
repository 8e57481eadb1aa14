#include "communicator/failure/news_store.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/error.h"

namespace hbm::failure {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAnswerPatience{200};   // for the store's answer to a question
constexpr milliseconds kSilentDecision{2000};  // whether a rank had left that has ended

KeyValue::Deadline soon() { return std::chrono::steady_clock::now() + kAnswerPatience; }

}  // namespace

void NewsStore::tend() {
  std::unique_lock lock(mutex_);
  const uint64_t round = ++begun_;
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
    lock.lock();
    const auto ended_before = Clock::now() - (silent ? kSilentDecision : milliseconds(0));
    decide_unanswered(ended_before, answers);
  }
  const auto told = static_cast<std::ptrdiff_t>(telling - to_tell.size());
  to_tell_.erase(to_tell_.begin(), to_tell_.begin() + told);
  if (complete) done_ = round;
  trouble_ = trouble;
  if (trouble.empty()) answered_ = Clock::now();
}

// Asks for those elsewhere that somebody waits for, and for those that have ended: who had ended
// before the question, and has not left, has died.
std::vector<NewsStore::Answer> NewsStore::ask_who_left() {
  std::vector<Answer> answers;
  std::unique_lock lock(mutex_);
  for (const auto& group : owner_.groups_of(keys_.get())) {
    if (!group->followed) continue;
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
  std::unique_lock lock(mutex_);
  for (const auto& group : owner_.groups_of(keys_.get())) {
    if (!group->followed || !group->leaving || group->has_left) continue;
    lock.unlock();
    group->store->set(group->left_prefix + std::to_string(group->rank), "1", soon());
    lock.lock();
    owner_.has_left(*group);
  }
}

// Takes those for dead that have ended, unless the store has said that they had left. REQUIRES:
// mutex_ is held.
void NewsStore::decide_unanswered(Clock::time_point ended_before,
                                  const std::vector<Answer>& answers) {
  for (const auto& group : owner_.groups_of(keys_.get())) {
    const auto undecided = group->undecided;
    for (const auto& [rank, since] : undecided) {
      if (since > ended_before) continue;
      owner_.decide(*group, rank, std::ranges::any_of(answers, [&](const Answer& answer) {
        return answer.group == group && answer.rank == rank && answer.has_left;
      }));
    }
  }
}

}  // namespace hbm::failure
