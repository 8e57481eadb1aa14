#include "process_group/monitored_barrier.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace hbm {
namespace {

constexpr const char* kVerdictKey = "verdict";
constexpr std::chrono::seconds kAnswer{1};

// Ends a wait for a rank that has died or left.
struct NeverComes : Error {
  explicit NeverComes(int gone) : Error(ErrorKind::kPeer, "it never comes"), rank(gone) {}
  int rank;
};

// The words of Gloo's rank 0; programs look for them.
std::string torch_words(const std::vector<int>& missing, bool wait_all_ranks,
                        const std::string& duration) {
  std::string ranks;
  for (const int rank : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return (wait_all_ranks ? "Ranks " : "Rank ") + ranks + " failed to pass monitoredBarrier in " +
         duration;
}

// The words of Gloo's other ranks.
std::string torch_words(int rank) {
  return "; Rank " + std::to_string(rank) +
         " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
         "from rank 0";
}

}  // namespace

MonitoredBarrier::MonitoredBarrier(bootstrap::Participant participant, const Peers& peers,
                                   std::chrono::milliseconds timeout)
    : participant_(watched(std::move(participant))),
      peers_(peers),
      timeout_(timeout),
      name_("monitored_barrier of " + participant_.group),
      duration_(std::to_string(timeout.count()) + " ms") {}

bootstrap::Participant MonitoredBarrier::watched(bootstrap::Participant participant) const {
  const auto look = [this] { require_needed(); };
  participant.store = std::make_shared<WatchedKeyValue>(std::move(participant.store), look);
  return participant;
}

void MonitoredBarrier::pass(bool wait_all_ranks) const {
  try {
    participant_.store->set(key_of(participant_.rank), "1", answer_by());
    if (participant_.rank == 0) {
      decide(wait_all_ranks);
    } else {
      await_verdict();
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNetwork) throw;
    throw Error(error.kind(), name_ + ": " + error.what() + participant_.watch->deaths());
  }
}

void MonitoredBarrier::decide(bool wait_all_ranks) const {
  std::vector<int> missing;
  for (int rank = 1; rank < participant_.size; ++rank) {
    const std::optional<int> absent = await_rank(rank, wait_all_ranks);
    if (!absent) continue;
    missing.push_back(*absent);
    if (!wait_all_ranks) break;
  }
  const Gone gone = gone_among(missing);
  const bool late = gone.dead.size() + gone.left.size() < missing.size();
  std::string verdict;
  if (late) {
    verdict = name_ + " timed out after " + duration_ + "; missing ranks: " + peers_.list(missing);
  }
  if (!gone.empty()) verdict += (late ? "; " : name_ + ": ") + tell(gone);
  participant_.store->set(participant_.prefix + kVerdictKey, verdict, answer_by());
  if (missing.empty()) return;
  const ErrorKind kind = late ? ErrorKind::kTimeout : ErrorKind::kPeer;
  throw Error(gone.dead.empty() ? kind : ErrorKind::kDeath,
              verdict + "; " +
                  (late ? "Rank 0 timed out in monitoredBarrier after " + duration_ + ": " : "") +
                  torch_words(missing, wait_all_ranks, duration_));
}

void MonitoredBarrier::await_verdict() const {
  // Rank 0 may use the whole timeout itself; its verdict comes a little later.
  const auto deadline = participant_.deadline + timeout_;
  const std::string key = participant_.prefix + kVerdictKey;
  if (!await_keys(*participant_.store, {key}, deadline, [this] { require_needed(); })) {
    throw Error(ErrorKind::kTimeout, name_ + " timed out after " + duration_ + "; missing ranks: " +
                                         peers_.list({0}) + torch_words(participant_.rank));
  }
  const std::string verdict = participant_.store->get(key, answer_by()).value();
  if (!verdict.empty()) throw Error(ErrorKind::kPeer, verdict + torch_words(participant_.rank));
}

// Waits for one rank, and returns the one that is missing: it, or, unless all are to be named,
// another that will not come any more.
std::optional<int> MonitoredBarrier::await_rank(int rank, bool wait_all_ranks) const {
  const auto look = [&] {
    std::vector<int> gone = peers_.dead();
    const std::vector<int> left = peers_.left({rank});
    gone.insert(gone.end(), left.begin(), left.end());
    for (const int each : gone) {
      if (each != rank && (wait_all_ranks || has_come(each))) continue;
      throw NeverComes(each);
    }
  };
  try {
    if (await_keys(*participant_.store, {key_of(rank)}, participant_.deadline, look)) return {};
  } catch (const NeverComes& absent) {
    return absent.rank;
  }
  return rank;
}

// Throws if one has died or left without whom the barrier cannot be passed: for rank 0 any other,
// for these rank 0.
void MonitoredBarrier::require_needed() const {
  std::vector<int> needed{0};
  if (participant_.rank == 0) {
    needed = bootstrap::everyone(participant_.size);
    needed.erase(needed.begin());
  }
  const Gone gone = gone_among(needed);
  if (gone.empty()) return;
  std::vector<int> missing = gone.dead;
  missing.insert(missing.end(), gone.left.begin(), gone.left.end());
  throw Error(
      gone.dead.empty() ? ErrorKind::kPeer : ErrorKind::kDeath,
      name_ + ": " + tell(gone) +
          (participant_.rank == 0 ? "; " + torch_words(missing, missing.size() > 1, duration_)
                                  : torch_words(participant_.rank)));
}

MonitoredBarrier::Gone MonitoredBarrier::gone_among(const std::vector<int>& ranks) const {
  const auto is_other = [&ranks](int rank) { return std::ranges::count(ranks, rank) == 0; };
  Gone gone{peers_.dead(), peers_.left(ranks)};
  std::erase_if(gone.dead, is_other);
  std::erase_if(gone.left, is_other);
  std::erase_if(gone.dead, [&](int rank) { return std::ranges::count(gone.left, rank) > 0; });
  return gone;
}

bool MonitoredBarrier::has_come(int rank) const {
  return participant_.store->has({key_of(rank)}, answer_by());
}

// When the store has to have answered, which takes a while where the barrier has no time left, too.
KeyValue::Deadline MonitoredBarrier::answer_by() const {
  return std::max(participant_.deadline + timeout_, std::chrono::steady_clock::now() + kAnswer);
}

std::string MonitoredBarrier::key_of(int rank) const {
  return participant_.prefix + std::to_string(rank);
}

// "rank 2 (pid 4711 on host) has died, rank 3 (pid 4712 on host) has destroyed the group"
std::string MonitoredBarrier::tell(const Gone& gone) const {
  std::string text;
  const auto add = [&](int rank, const char* fate) {
    text += (text.empty() ? "rank " : ", rank ") + peers_.list({rank}) + fate;
  };
  for (const int rank : gone.dead) add(rank, " has died");
  for (const int rank : gone.left) add(rank, " has destroyed the group");
  return text;
}

}  // namespace hbm
