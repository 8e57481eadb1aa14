// One step of bootstrap: ranks tell one another something through the store, or why they cannot go
// on, so that no rank waits for one that has failed, and an error names those that did not come.
//
// Threads: the ranks may be threads; each makes its calls one after another.
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

// One rank's place among ranks that gather.
struct Participant {
  std::shared_ptr<KeyValue> store;
  std::string prefix;  // of the keys, which no other gathering in the store uses
  int rank;
  int size;
  std::string group;  // as errors name it
  KeyValue::Deadline deadline;
  std::shared_ptr<RankWatch> watch = nullptr;  // null: nobody looks for deaths

  // For the first step, whose keys are by the ranks' numbers in the job.
  std::string first_prefix = {};       // of its keys; empty: `prefix`
  std::vector<uint64_t> members = {};  // each rank's number in the job; empty: the same

  // The steps that this rank has begun, for remove_steps(). Null: not recorded.
  std::shared_ptr<std::set<std::string>> steps = nullptr;

  // Throws Error(kDeath) if one of `ranks` has died.
  void require_alive(const std::vector<int>& ranks) const {
    if (watch) watch->check(ranks);
  }
};

// The key behind which a rank tells what it does in a step.
std::string step_key(const Participant& participant, const std::string& step, int rank);

// The counter of a step (bootstrap/agreement.h).
std::string count_key(const Participant& participant, const std::string& step);

// Removes the keys of every step except the first. The records of the first step stay, because a
// rank counts by them how many groups it has formed in the store. REQUIRES: `steps` is recorded,
// and no rank reads or writes a key of a step any more.
void remove_steps(const Participant& participant);

// Throws Error(kTimeout) naming those of `among` that have told nothing in the step.
[[noreturn]] void throw_missing(const Participant& participant, const std::string& step,
                                const std::vector<int>& among);

// The ranks 0 to size - 1.
std::vector<int> everyone(int size);

// Hands what `tell` returns to the ranks of `among`, this one included, and returns what each of
// them told, indexed by rank; empty for ranks outside. All of them call it, once for each `step`.
//
// An exception from `tell` is told as well. It is thrown here after the others have come, or some
// seconds later; on the others it becomes Error(kUnavailable): "rank 2 of ... cannot take part: "
// and its text. Throws Error(kTimeout) naming the ranks that did not come, Error(kDeath) naming one
// that has died before all have come. Steps may be nested: what a step within `tell` reports of
// another rank keeps its words.
//
// `arrived` is called with what each rank tells, once for each: while others are still to come, if
// that takes more than some milliseconds.
std::vector<std::string> gather(const Participant& participant, const std::string& step,
                                const std::vector<int>& among,
                                const std::function<std::string()>& tell,
                                const std::function<void(int, const std::string&)>& arrived = {});

// The first step of an attempt to form a group. A rank's record in it begins with its claim
// (bootstrap/claim.h). gather() throws Error(kMismatch) if another process has claimed the rank.
inline constexpr const char* kFirstStep = "rendezvous";

// The first step that counts (bootstrap/agreement.h).
inline constexpr const char* kFirstCount = "calls";

// Ends the attempt for all ranks, unless it is over: those that wait throw Error(kUnavailable) with
// this text within some 200 ms. Returns false if another rank has ended it before.
bool end_attempt(const Participant& participant, const std::string& why);

// Throws why the attempt has ended, if another rank has ended it.
void require_going_on(const Participant& participant, KeyValue::Deadline deadline);

// Throws Error(kMismatch): the process that has written this record in the first step has claimed
// this rank. Ends the attempt for the other ranks, which cannot tell the two processes apart.
[[noreturn]] void throw_taken(const Participant& participant, const std::string& record);

// Throws as throw_taken() does unless this process, or its is_predecessor(), has written the
// record.
void require_own_claim(const Participant& participant, const std::string& record);

// Runs `act`, which is a part of such an attempt. What it throws ends the attempt for all ranks:
// who waits in a step throws too, soon, and who has not read yet what this rank told in the first
// step reads there that it cannot take part. A death, or a store that is gone, they see for
// themselves; an error of the network, which mostly follows one, is not told.
void attempt(const Participant& participant, const std::function<void()>& act);

// Looks, while this rank waits in a step, for what ends the attempt. Throws Error(kDeath) if one of
// `among` has died; what another rank has thrown in attempt() as Error(kUnavailable), or as
// Error(kTimeout) if it was that.
class Lookout {
 public:
  // REQUIRES: `participant` and `among` outlive it.
  Lookout(const Participant& participant, const std::vector<int>& among)
      : participant_(participant), among_(among) {}

  void look();

 private:
  const Participant& participant_;
  const std::vector<int>& among_;
  std::chrono::steady_clock::time_point next_ =
      std::chrono::steady_clock::now() + kAbortCheckPeriod;
};

// Returns the text that `rank` tells in a step, once it does; nothing if that is not by `until`, if
// it cannot go on, or if any rank is known to have died: gather() names it. A store that does not
// answer throws at the participant's deadline.
std::optional<std::string> await_told(const Participant& participant, const std::string& step,
                                      int rank, KeyValue::Deadline until);

}  // namespace hbm::bootstrap
