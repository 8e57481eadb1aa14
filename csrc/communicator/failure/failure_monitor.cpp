#include "communicator/failure/failure_monitor.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"

namespace hbm::failure {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRound{250};
constexpr std::chrono::milliseconds kReportPatience{200};
constexpr std::chrono::milliseconds kEndPatience{1000};
constexpr std::chrono::milliseconds kLostAfter{1000};  // of errors
constexpr std::chrono::milliseconds kAnswerPatience{500};

KeyValue::Deadline soon() { return Clock::now() + kAnswerPatience; }

// Keys of a group in the store, behind its prefix.
constexpr const char* kFailure = "failure";  // what broke the group: the latest report
constexpr const char* kDeaths = "deaths";    // ranks, separated by spaces
constexpr const char* kLeft = "left/";       // + rank: it destroyed the group in good order

std::set<int> parse(const std::string& ranks) {
  std::istringstream words(ranks);
  std::set<int> found;
  for (int rank = 0; words >> rank;) found.insert(rank);
  return found;
}

std::string format(const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : " ") + std::to_string(rank);
  return text;
}

}  // namespace

struct FailureMonitor::Notes {
  const MonitorSetup setup;

  std::mutex mutex;  // guards the members below; never held while the store is asked
  std::condition_variable changed;
  bool stopping = false;
  bool leaving = false;
  bool has_left = false;
  std::optional<std::string> to_report;
  std::set<int> wanted;  // ranks that somebody waits for
  std::set<int> dead;
  std::set<int> left;
  std::optional<std::string> failure;
  std::string trouble;  // with the store; empty: none
  Clock::time_point answered = Clock::now();

  explicit Notes(MonitorSetup given) : setup(std::move(given)) {}

  void round();
  void stop() {
    const std::lock_guard lock(mutex);
    stopping = true;
    changed.notify_all();
  }
  bool has_left_in_store(int rank) {
    return setup.store->has({setup.prefix + kLeft + std::to_string(rank)}, soon());
  }
};

// One look at everything; what cannot be had is left for the next.
void FailureMonitor::Notes::round() {
  std::optional<std::string> report;
  std::set<int> asked;
  bool leave = false;
  {
    const std::lock_guard lock(mutex);
    report = to_report;
    asked = wanted;
    leave = leaving && !has_left;
  }
  const std::vector<int> seen = setup.dead();
  std::set<int> gone(seen.begin(), seen.end());
  try {
    if (report) setup.store->set(setup.prefix + kFailure, *report, soon());
    if (leave) setup.store->set(setup.prefix + kLeft + std::to_string(setup.rank), "1", soon());
    std::set<int> away;
    for (const int rank : asked) {
      if (has_left_in_store(rank)) away.insert(rank);
    }
    std::erase_if(gone, [&](int rank) { return has_left_in_store(rank); });
    std::set<int> known = parse(setup.store->get(setup.prefix + kDeaths, soon()).value_or(""));
    if (!std::includes(known.begin(), known.end(), gone.begin(), gone.end())) {
      known.insert(gone.begin(), gone.end());
      setup.store->set(setup.prefix + kDeaths, format(known), soon());
    }
    const auto failed = setup.store->get(setup.prefix + kFailure, soon());
    const std::lock_guard lock(mutex);
    if (to_report == report) to_report.reset();
    has_left = has_left || leave;
    left.insert(away.begin(), away.end());
    dead.insert(known.begin(), known.end());
    failure = failed;
    trouble.clear();
    answered = Clock::now();
  } catch (const Error& error) {
    const std::lock_guard lock(mutex);
    dead.insert(gone.begin(), gone.end());  // seen with our own eyes
    // A store that does not answer proves nothing.
    if (error.kind() != ErrorKind::kTimeout) trouble = error.what();
  }
}

// The threads of this process. When it ends, they must be out of the store before the libraries'
// own state goes.
class FailureMonitor::Threads {
 public:
  static Threads& all() { return per_process<Threads>(); }

  void start(const std::shared_ptr<Notes>& notes) {
    static std::once_flag once;
    std::call_once(once, [] { std::atexit([] { all().end(); }); });
    const std::lock_guard lock(mutex_);
    std::thread([this, notes] { live(notes); }).detach();
    running_.insert(notes.get());
  }

  // Stops a thread, and waits until it has let go of the store: a process that ended in the middle
  // of a write would leave a FileStore that others read for ever.
  void stop(Notes* notes) {
    notes->stop();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kEndPatience, [&] { return !running_.contains(notes); });
  }

 private:
  void live(std::shared_ptr<Notes> notes) {
    Notes* const key = notes.get();
    run(notes);
    const std::lock_guard lock(mutex_);
    notes.reset();  // with the store, if nobody else has it
    running_.erase(key);
    changed_.notify_all();
  }

  void end() {
    std::unique_lock lock(mutex_);
    for (Notes* const notes : running_) notes->stop();
    changed_.wait_for(lock, kEndPatience, [this] { return running_.empty(); });
  }

  std::mutex mutex_;  // taken before that of Notes
  std::condition_variable changed_;
  std::set<Notes*> running_;  // guarded by mutex_
};

FailureMonitor::FailureMonitor(MonitorSetup setup)
    : notes_(std::make_shared<Notes>(std::move(setup))) {
  Threads::all().start(notes_);
}

void FailureMonitor::run(const std::shared_ptr<Notes>& notes) {
  std::unique_lock lock(notes->mutex);
  while (!notes->stopping) {
    lock.unlock();
    notes->round();
    lock.lock();
    notes->changed.notify_all();
    const bool urgent = notes->to_report || (notes->leaving && !notes->has_left);
    if (!urgent || !notes->trouble.empty()) notes->changed.wait_for(lock, kRound);
  }
}

void FailureMonitor::check(const Operation& operation) {
  if (fork_.in_child()) return;
  const std::vector<int> missing = operation.missing();
  const std::lock_guard lock(notes_->mutex);
  notes_->wanted.insert(missing.begin(), missing.end());
  // First: who has died since may have ended because of it.
  if (notes_->failure) {
    throw Error(ErrorKind::kPeer, notes_->setup.group + " has failed: " + *notes_->failure);
  }
  for (const int rank : missing) {
    const std::string& name = notes_->setup.names[static_cast<size_t>(rank)];
    if (notes_->left.contains(rank)) {
      throw Error(ErrorKind::kPeer, operation.describe() + ": " + notes_->setup.group +
                                        " was destroyed on a rank that this one waits for, " +
                                        name);
    }
    if (notes_->dead.contains(rank)) {
      throw Error(ErrorKind::kDeath, operation.describe() + ": " + name + " has died");
    }
  }
  if (notes_->trouble.empty() || Clock::now() - notes_->answered <= kLostAfter) return;
  throw Error(ErrorKind::kNetwork,
              operation.describe() +
                  ": the store is gone, and with it the reports of other nodes' failures (" +
                  notes_->trouble + ")");
}

void FailureMonitor::report(const std::string& failure) {
  if (fork_.in_child()) return;
  std::unique_lock lock(notes_->mutex);
  notes_->to_report = failure;
  notes_->changed.notify_all();
  notes_->changed.wait_for(lock, kReportPatience, [this] { return !notes_->to_report; });
}

std::vector<int> FailureMonitor::dead() const {
  if (fork_.in_child()) return {};
  const std::lock_guard lock(notes_->mutex);
  return {notes_->dead.begin(), notes_->dead.end()};
}

void FailureMonitor::leave(std::chrono::milliseconds patience) {
  if (fork_.in_child()) return;
  std::unique_lock lock(notes_->mutex);
  notes_->leaving = true;
  notes_->changed.notify_all();
  const bool told = notes_->changed.wait_for(lock, patience, [this] { return notes_->has_left; });
  if (!told) log::info("cannot tell the other ranks of leaving " + notes_->setup.group);
}

void FailureMonitor::stop() {
  if (!fork_.in_child()) Threads::all().stop(notes_.get());
}

}  // namespace hbm::failure
