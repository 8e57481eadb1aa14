// A step of group formation: each rank publishes a text in the store, or the reason why it cannot
// continue. So no rank waits for a rank that has failed, and an error names the ranks that did not
// arrive.
//
// Threads: ranks may be threads; each rank makes its calls one after another.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"
#include "bootstrap/rank_watch.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {

// One rank of a set of ranks that gather.
struct Participant {
  std::shared_ptr<KeyValue> store;
  std::string prefix;  // of the keys; no other gathering in the store uses it
  int rank;
  int size;
  std::string group;  // as errors name it
  KeyValue::Deadline deadline;
  std::shared_ptr<RankWatch> watch = nullptr;  // null: deaths are not detected

  // The keys of the first step contain the ranks' numbers in the job.
  std::string first_prefix = {};       // of the first step's keys; empty: `prefix`
  std::vector<uint64_t> members = {};  // each rank's number in the job; empty: its rank

  // For the error that names missing ranks.
  std::vector<std::string> names = {};  // of the ranks; empty: their numbers
  std::string advice = "Did they start, and with the same world size?";

  // The steps that this rank has begun, for remove_steps(). Null: not recorded.
  std::shared_ptr<std::set<std::string>> steps = nullptr;

  // Throws Error(kDeath) if one of `ranks` has died.
  void require_alive(const std::vector<int>& ranks) const {
    if (watch) watch->check(ranks);
  }
};

// Returns the key of a rank's record in a step.
std::string step_key(const Participant& participant, const std::string& step, int rank);

// Returns the key of a step's counter (bootstrap/agreement.h).
std::string count_key(const Participant& participant, const std::string& step);

// Removes the keys of every step except the first. The records of the first step stay: from them a
// rank counts the group's earlier formations in the store. REQUIRES: `steps` is recorded, and no
// rank will read or write a key of a step again.
void remove_steps(const Participant& participant);

// Throws Error(kTimeout) naming the ranks of `among` that have no record in the step.
[[noreturn]] void throw_missing(const Participant& participant, const std::string& step,
                                const std::vector<int>& among);

// Returns the ranks 0 to size - 1.
std::vector<int> everyone(int size);

// Publishes the result of own_text() to the ranks of `among`, this rank included. Returns the text
// of each of these ranks, indexed by rank; empty for other ranks. Every rank of `among` calls it
// once for each `step`.
//
// An exception of own_text() is published too. It is thrown here after the other ranks have
// arrived, or after kLastRecordTimeout. On the other ranks it becomes Error(kUnavailable): "rank 2
// of ... cannot take part: " and its text. An Error(kDeath) is thrown here immediately and not
// published, because every rank detects deaths itself. own_text() may run another step. If that
// step throws the error of a third rank, this error is published with its text unchanged.
//
// Throws Error(kTimeout) naming the missing ranks, Error(kDeath) naming a rank that has died before
// all arrived.
//
// Calls `arrived` at most once for each rank, with the rank and its text; exactly once for each if
// gather() returns. If the wait takes longer than kRecordCheckPeriod, some calls come before the
// last rank arrives.
std::vector<std::string> gather(const Participant& participant, const std::string& step,
                                const std::vector<int>& among,
                                const std::function<std::string()>& own_text,
                                const std::function<void(int, const std::string&)>& arrived = {});

// The first step of a group formation. A rank's record in this step begins with its claim
// (bootstrap/claim.h). gather() throws Error(kMismatch) if another process has claimed the rank.
inline constexpr const char* kFirstStep = "rendezvous";

// The first step that uses a counter (bootstrap/agreement.h).
inline constexpr const char* kFirstCount = "calls";

// Aborts the group formation for all ranks, unless it has ended. Ranks that wait throw
// Error(kUnavailable) with the text `why` within some 200 ms (kAbortCheckPeriod), or within a
// millisecond for each rank if that is longer. Returns false if another rank has aborted it before.
bool abort_formation(const Participant& participant, const std::string& why);

// Throws the reason if another rank has aborted the group formation.
void require_not_aborted(const Participant& participant, KeyValue::Deadline deadline);

// Throws Error(kMismatch): another process has claimed this rank, by writing `record` in the first
// step. Aborts the group formation for the other ranks, which cannot tell the two processes apart.
[[noreturn]] void throw_claimed(const Participant& participant, const std::string& record);

// Throws as throw_claimed() does if the writer of `record` is neither this process nor its
// predecessor (is_predecessor()).
void require_own_claim(const Participant& participant, const std::string& record);

// Runs `act`, a part of a group formation. An exception other than a death or a network error
// aborts the formation on every rank. A rank that waits in a step then throws soon. A rank that
// comes later reads this rank's record of the first step, and finds the reason there. A death or a
// network error aborts nothing. Each rank detects deaths and the end of the store itself, and most
// network errors follow from one of these.
void run_in_formation(const Participant& participant, const std::function<void()>& act);

// A rank that waits in a step calls check() repeatedly. check() throws if a rank of `among` has
// died, or if another rank has aborted the group formation.
class AbortWatcher {
 public:
  // REQUIRES: `participant` and `among` outlive this object.
  AbortWatcher(const Participant& participant, const std::vector<int>& among)
      : participant_(participant), among_(among) {}

  void check();

 private:
  const Participant& participant_;
  const std::vector<int>& among_;
  std::chrono::steady_clock::time_point next_ =
      std::chrono::steady_clock::now() + kAbortCheckPeriod;
};

// Waits, until `until` at most, for the text that `rank` publishes in a step, and returns it.
// Returns nothing at `until`, or if `rank` has published a problem. Also returns nothing if any
// rank has died: a later gather() throws that death. If the store does not answer, throws a
// StoreError at the participant's deadline.
std::optional<std::string> await_published(const Participant& participant, const std::string& step,
                                           int rank, KeyValue::Deadline until);

}  // namespace hbm::bootstrap
