#include "process_group/monitored_barrier.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "bootstrap/tuning.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

constexpr const char* kVerdictKey = "verdict";
constexpr const char* kDeciderKey = "decider";

// Ends a wait for a rank that has died or left.
struct NeverComes : Error {
  explicit NeverComes(int gone) : Error(ErrorKind::kPeer, "it never comes"), rank(gone) {}
  int rank;
};

// Ends a wait for a rank: another rank has published the verdict.
struct DecidedElsewhere : Error {
  DecidedElsewhere() : Error(ErrorKind::kPeer, "another rank has decided") {}
};

// Returns the error text of Gloo's rank 0, which programs search for.
std::string torch_words(const std::vector<int>& missing, bool wait_all_ranks,
                        const std::string& duration) {
  std::string ranks;
  for (const int rank : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return (wait_all_ranks ? "Ranks " : "Rank ") + ranks + " failed to pass monitoredBarrier in " +
         duration;
}

// Returns the error text of Gloo's other ranks.
std::string torch_words(int rank) {
  return "; Rank " + std::to_string(rank) +
         " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
         "from rank 0";
}

std::string prefix_of(const bootstrap::Participant& participant, uint64_t number) {
  return participant.prefix + "monitored_barrier" + std::to_string(number) + "/";
}

}  // namespace

std::string MonitoredBarrier::Verdict::record() const {
  if (missing.empty()) return {};
  std::string text = std::to_string(static_cast<int>(kind));
  for (const int rank : missing) text += " " + std::to_string(rank);
  return text + "\n" + cause;
}

MonitoredBarrier::Verdict MonitoredBarrier::Verdict::parse(const std::string& record) {
  Verdict verdict;
  if (record.empty()) return verdict;
  const size_t end = record.find('\n');
  std::istringstream numbers(record.substr(0, end));
  int kind = 0;
  numbers >> kind;
  verdict.kind = static_cast<ErrorKind>(kind);
  for (int rank = 0; numbers >> rank;) verdict.missing.push_back(rank);
  verdict.cause = record.substr(end + 1);
  return verdict;
}

MonitoredBarrier::MonitoredBarrier(bootstrap::Participant participant, uint64_t number,
                                   const communicator::Peers& peers,
                                   std::chrono::milliseconds timeout, bool wait_all_ranks)
    : previous_(keys_of(participant, number - 1)),
      participant_(watched(std::move(participant), number)),
      peers_(peers),
      timeout_(timeout),
      wait_all_ranks_(wait_all_ranks),
      name_("monitored_barrier of " + participant_.group),
      duration_(std::to_string(timeout.count()) + " ms") {}

std::vector<std::string> MonitoredBarrier::keys_of(const bootstrap::Participant& participant,
                                                   uint64_t number) {
  if (number == 0) return {};
  const std::string prefix = prefix_of(participant, number);
  std::vector<std::string> keys{prefix + kDeciderKey, prefix + kVerdictKey};
  for (int rank = 0; rank < participant.size; ++rank) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

bootstrap::Participant MonitoredBarrier::watched(bootstrap::Participant participant,
                                                 uint64_t number) const {
  participant.prefix = prefix_of(participant, number);
  const auto check = [this] { require_needed(); };
  participant.store =
      std::make_shared<bootstrap::WatchedKeyValue>(std::move(participant.store), check);
  return participant;
}

void MonitoredBarrier::pass() const {
  Verdict verdict;
  try {
    participant_.store->set(key_of(participant_.rank), "1", answer_by());
    verdict = participant_.rank == 0 ? decide() : await_verdict();
  } catch (const bootstrap::StoreError& error) {
    throw Error(error.kind(), name_ + ": " + error.what() +
                                  (error.was_removed ? "" : participant_.watch->deaths()));
  }
  if (verdict.missing.empty()) return;
  throw Error(verdict.kind,
              verdict.cause + (participant_.rank == 0 ? words_of_rank_0(verdict)
                                                      : torch_words(participant_.rank)));
}

std::string MonitoredBarrier::words_of_rank_0(const Verdict& verdict) const {
  const bool blames_own = verdict.missing.front() == 0;
  const bool late = verdict.kind == ErrorKind::kTimeout && !blames_own;
  return "; " + (late ? "Rank 0 timed out in monitoredBarrier after " + duration_ + ": " : "") +
         torch_words(verdict.missing, wait_all_ranks_, duration_);
}

MonitoredBarrier::Verdict MonitoredBarrier::decide() const {
  std::vector<int> missing;
  try {
    for (int rank = 1; rank < participant_.size; ++rank) {
      const std::optional<int> absent = await_rank(rank);
      if (!absent) continue;
      missing.push_back(*absent);
      if (!wait_all_ranks_) break;
    }
  } catch (const DecidedElsewhere&) {
    return await_publication(participant_.rank);  // already published
  }
  // Every rank has arrived at this barrier, so no rank reads the keys of the previous barrier.
  if (missing.empty()) participant_.store->remove(previous_);
  return publish(verdict_on(missing));
}

// Each rank except rank 0 waits for the first verdict. At its deadline the rank decides itself,
// because rank 0 may be missing, or may have arrived so late that the deadline of rank 0 is far
// away.
MonitoredBarrier::Verdict MonitoredBarrier::await_verdict() const {
  const std::optional<std::string> published = bootstrap::await_value(
      *participant_.store, verdict_key(), participant_.deadline, [this] { require_needed(); });
  if (published) return Verdict::parse(*published);
  std::vector<int> missing;
  for (int rank = 0; rank < participant_.size; ++rank) {
    if (rank == participant_.rank || has_arrived(rank)) continue;
    missing.push_back(rank);
    if (!wait_all_ranks_) break;
  }
  return publish(verdict_on(missing));
}

MonitoredBarrier::Verdict MonitoredBarrier::verdict_on(std::vector<int> missing) const {
  Verdict verdict;
  if (missing.empty()) return verdict;
  const Gone gone = gone_among(missing);
  const bool late = gone.dead.size() + gone.left.size() < missing.size();
  if (late) {
    verdict.cause =
        name_ + " timed out after " + duration_ + "; missing ranks: " + peers_.list(missing);
  }
  if (!gone.empty()) verdict.cause += (late ? "; " : name_ + ": ") + describe(gone);
  verdict.kind = !gone.dead.empty() ? ErrorKind::kDeath
                 : late             ? ErrorKind::kTimeout
                                    : ErrorKind::kPeer;
  verdict.missing = std::move(missing);
  return verdict;
}

// Publishes the verdict if no other rank has claimed the decision before. Returns the published
// verdict. The store orders the claims, so exactly one rank publishes, whichever deadline comes
// first.
MonitoredBarrier::Verdict MonitoredBarrier::publish(Verdict own) const {
  const int decider = std::stoi(participant_.store->claim(
      participant_.prefix + kDeciderKey, std::to_string(participant_.rank), answer_by()));
  if (decider != participant_.rank) return await_publication(decider);
  participant_.store->set(verdict_key(), own.record(), answer_by());
  return own;
}

// Returns the verdict of `decider`, the rank that has claimed the decision. The verdict follows the
// claim immediately. The death of another rank does not end this wait, because the verdict names
// that rank.
MonitoredBarrier::Verdict MonitoredBarrier::await_publication(int decider) const {
  const std::optional<std::string> published = bootstrap::await_value(
      *participant_.store, verdict_key(), std::chrono::steady_clock::now() + kVerdictTimeout,
      [&] { require_present({decider}); });
  if (published) return Verdict::parse(*published);
  throw Error(ErrorKind::kTimeout,
              name_ + " timed out after " + duration_ + ", and rank " + peers_.list({decider}) +
                  ", which was to name the missing ones, has not done so; it is stopped, or has "
                  "died");
}

// Waits for `rank`. Returns nothing when it has arrived, and `rank` if it is missing. Without
// wait_all_ranks, may end the wait earlier and return another rank that will never arrive. Throws
// DecidedElsewhere if another rank has published the verdict.
std::optional<int> MonitoredBarrier::await_rank(int rank) const {
  const auto check = [&] {
    if (participant_.store->has({verdict_key()}, answer_by())) throw DecidedElsewhere();
    std::vector<int> gone = peers_.dead();
    const std::vector<int> left = peers_.left({rank});
    gone.insert(gone.end(), left.begin(), left.end());
    for (const int each : gone) {
      if (each != rank && (wait_all_ranks_ || has_arrived(each))) continue;
      throw NeverComes(each);
    }
  };
  try {
    const std::vector<std::string> keys{key_of(rank)};
    if (bootstrap::await_keys(*participant_.store, keys, participant_.deadline, check)) return {};
  } catch (const NeverComes& absent) {
    return absent.rank;
  }
  return rank;
}

// Throws if a rank that this rank needs has died or left. All other ranks need rank 0. Rank 0 needs
// all other ranks. With wait_all_ranks rank 0 needs no rank, because its verdict names all missing
// ranks.
void MonitoredBarrier::require_needed() const {
  std::vector<int> needed{0};
  if (participant_.rank == 0) {
    if (wait_all_ranks_) return;
    needed = bootstrap::everyone(participant_.size);
    needed.erase(needed.begin());
  }
  require_present(needed);
}

// Throws if one of the ranks has died or left.
void MonitoredBarrier::require_present(const std::vector<int>& ranks) const {
  const Gone gone = gone_among(ranks);
  if (gone.empty()) return;
  std::vector<int> missing = gone.dead;
  missing.insert(missing.end(), gone.left.begin(), gone.left.end());
  throw Error(
      gone.dead.empty() ? ErrorKind::kPeer : ErrorKind::kDeath,
      name_ + ": " + describe(gone) +
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

bool MonitoredBarrier::has_arrived(int rank) const {
  return participant_.store->has({key_of(rank)}, answer_by());
}

// Returns the deadline for an answer of the store. It is at least a second from now, even if the
// barrier has no time left.
bootstrap::KeyValue::Deadline MonitoredBarrier::answer_by() const {
  return std::max(participant_.deadline,
                  std::chrono::steady_clock::now() + bootstrap::kStoreAnswerTimeout);
}

std::string MonitoredBarrier::verdict_key() const { return participant_.prefix + kVerdictKey; }

std::string MonitoredBarrier::key_of(int rank) const {
  return participant_.prefix + std::to_string(rank);
}

// Returns "rank 2 (pid 4711 on host) has died, rank 3 (pid 4712 on host) has destroyed the group".
std::string MonitoredBarrier::describe(const Gone& gone) const {
  std::string text;
  const auto add = [&](int rank, const char* fate) {
    text += (text.empty() ? "rank " : ", rank ") + peers_.list({rank}) + fate;
  };
  for (const int rank : gone.dead) add(rank, " has died");
  for (const int rank : gone.left) add(rank, " has destroyed the group");
  return text;
}

}  // namespace hbm::process_group
