// The failure log: a list in the store, by which the processes of a job tell one another of deaths
// and failures. Each process appends entries, and reads the list to its end. A writer reserves a
// number, then writes the entry under this number, and may die in between. So a reader that finds
// no entry under a number asks again in kRoundsForFailureEntry rounds, then skips the number.
//
// Threads: one at a time.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bootstrap/key_value.h"

namespace hbm::communicator::failure {

enum class FailureKind { kDeath, kFailure, kClosing, kClaimedTwice };

struct FailureEntry {
  FailureKind kind;
  std::string about;  // kDeath: a process' id; else a group's key
  std::string text;   // kClosing: the group rank that serves the store; else text for errors
};

// Convert an entry to and from text, for the store and for a claim mailbox. parse() returns no
// value if the record is not of this version.
std::string format(const FailureEntry& entry);
std::optional<FailureEntry> parse(const std::string& record);

class FailureLog {
 public:
  explicit FailureLog(std::shared_ptr<bootstrap::KeyValue> store) : store_(std::move(store)) {}

  // Appends `entries` to the log, and removes each from `entries` when it is in the store. Then
  // passes to `heard` the entries that are new since the last call, also the entries that this call
  // has appended. `answer_time`: the time that the store has to answer each question. Throws the
  // errors of the store.
  void exchange(std::deque<FailureEntry>& entries, std::chrono::milliseconds answer_time,
                const std::function<void(const FailureEntry&)>& heard);

 private:
  const std::shared_ptr<bootstrap::KeyValue> store_;
  long read_ = 0;                // the highest number that a writer is known to have reserved
  std::map<long, int> missing_;  // numbers without an entry yet, and how often each was asked for
};

}  // namespace hbm::communicator::failure
