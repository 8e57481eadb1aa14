#include "bootstrap/gather.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <new>
#include <numeric>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/agreement.h"
#include "bootstrap/claim.h"
#include "bootstrap/rendezvous.h"

namespace hbm::bootstrap {
namespace {

// The first character of a rank's record.
constexpr char kResult = '+';
constexpr char kProblem = '!';
constexpr char kRelayed = '>';  // a problem of another rank, which the text names

// The first character of the reason why a group formation was aborted.
constexpr char kLate = 't';
constexpr char kUnable = 'u';

class ProblemElsewhere : public Error {
 public:
  explicit ProblemElsewhere(const std::string& text, ErrorKind kind = ErrorKind::kUnavailable)
      : Error(kind, text) {}
};

std::string list(const Participant& participant, const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + (participant.names.empty()
                                              ? std::to_string(rank)
                                              : participant.names[static_cast<size_t>(rank)]);
  }
  return text;
}

void warn_of_unreachable(const Error& unreachable) {
  log::warn(std::string("cannot tell the other ranks why this one fails: ") + unreachable.what());
}

std::string problem_of(const Participant& participant, int rank, const std::string& why) {
  return "rank " + std::to_string(rank) + " of " + participant.group + " cannot take part: " + why;
}

std::string end_key(const Participant& participant) { return participant.prefix + "given_up"; }

// Makes a record of this rank. In the first step, the record begins with this process' claim.
std::string make_record(const std::string& step, char kind, const std::string& text) {
  return step == kFirstStep ? kind + encode(own_claim()) + "\n" + text : kind + text;
}

Claim claim_of(const std::string& record) {
  return decode_claim(record.substr(1, record.find('\n') - 1));
}

std::string text_of(const std::string& step, const std::string& record) {
  return record.substr(step == kFirstStep ? record.find('\n') + 1 : 1);
}

// Writes this rank's record of a step. Throws if another process has claimed the rank.
void leave_record(const Participant& participant, const std::string& step,
                  const std::string& record, KeyValue::Deadline deadline) {
  const std::string key = step_key(participant, step, participant.rank);
  if (step != kFirstStep) return participant.store->set(key, record, deadline);
  const std::string found = participant.store->claim(key, record, deadline);
  if (found != record) throw_claimed(participant, found);
}

// Aborts the group formation, and writes the reason under two keys. A rank that waits may have read
// this rank's record already, and reads no record twice, so it finds the reason under end_key(). A
// rank that arrives late finds all records and does not wait, so it finds the reason in this rank's
// record.
void abort_with(const Participant& participant, char kind, const std::string& why) {
  const auto until = std::chrono::steady_clock::now() + kStoreAnswerTimeout;
  try {
    const std::string record = make_record(kFirstStep, kProblem, why);
    const std::string key = step_key(participant, kFirstStep, participant.rank);
    const std::string found = participant.store->claim(key, record, until);
    if (found != record && claim_of(found).process == process_id()) {
      participant.store->set(key, record, until);
    }
    participant.store->set(end_key(participant),
                           kind + problem_of(participant, participant.rank, why), until);
  } catch (const Error& unreachable) {
    warn_of_unreachable(unreachable);
  }
}

void publish_last_record(const Participant& participant, const std::string& step,
                         const std::string& problem, const std::vector<std::string>& others) {
  try {
    const auto until =
        std::min(participant.deadline, std::chrono::steady_clock::now() + kLastRecordTimeout);
    leave_record(participant, step, problem, until);
    await_keys(*participant.store, others, until);
  } catch (const ProblemElsewhere&) {
    throw;  // another process has claimed the rank
  } catch (const Error& unreachable) {
    warn_of_unreachable(unreachable);
  }
}

// Reads the records of the other ranks, some of them before the last rank arrives.
class IncomingRecords {
 public:
  using Arrived = std::function<void(int rank, const std::string& text)>;
  IncomingRecords(const Participant& participant, const std::string& step,
                  const std::vector<int>& among, const std::vector<std::string>& keys,
                  const std::string& own, const Arrived& arrived)
      : participant_(participant), step_(step), among_(among), keys_(keys), arrived_(arrived) {
    records_.resize(among.size());
    for (size_t i = 0; i < among.size(); ++i) {
      if (among[i] == participant.rank) {
        receive(i, own);
      } else {
        unread_.push_back(i);
      }
    }
  }

  // Waits until all ranks have arrived. Returns false at the deadline.
  bool await(const std::function<void()>& check) {
    KeyValue& store = *participant_.store;
    if (unread_.empty()) return true;
    if (unread_.size() > 1) {
      return await_keys(store, keys_, participant_.deadline, [&] {
        read_some();
        check();
      });
    }
    const size_t last = unread_.front();
    const auto record = await_value(store, keys_[last], participant_.deadline, check);
    if (!record) return false;
    unread_.clear();
    receive(last, *record);
    return true;
  }

  // Returns the records of all ranks. REQUIRES: all ranks have arrived.
  std::vector<std::string> all() {
    std::vector<std::string> keys;
    for (const size_t index : unread_) keys.push_back(keys_[index]);
    if (!keys.empty()) {
      const std::vector<std::string> found =
          participant_.store->get_all(keys, participant_.deadline + kStoreAnswerTimeout);
      for (size_t i = 0; i < found.size(); ++i) receive(unread_[i], found[i]);
    }
    return std::move(records_);
  }

 private:
  // Asks for some of the unread records, once in a kRecordCheckPeriod.
  void read_some() {
    const auto now = std::chrono::steady_clock::now();
    if (!arrived_ || now < next_read_) return;
    for (size_t n = std::min(kRecordsPerCheck, unread_.size()); n > 0; --n) {
      const size_t index = unread_.front();
      const auto record = participant_.store->get(
          keys_[index], std::max(participant_.deadline, now + kStoreAnswerTimeout));
      unread_.pop_front();
      if (record) {
        receive(index, *record);
      } else {
        unread_.push_back(index);
      }
    }
    next_read_ = std::chrono::steady_clock::now() + kRecordCheckPeriod;
  }

  void receive(size_t index, const std::string& record) {
    records_[index] = record;
    if (arrived_ && record.front() == kResult) arrived_(among_[index], text_of(step_, record));
  }

  const Participant& participant_;
  const std::string& step_;
  const std::vector<int>& among_;
  const std::vector<std::string>& keys_;
  const Arrived& arrived_;
  std::vector<std::string> records_;
  std::deque<size_t> unread_;
  std::chrono::steady_clock::time_point next_read_ =
      std::chrono::steady_clock::now() + kRecordCheckPeriod;
};

}  // namespace

std::string step_key(const Participant& participant, const std::string& step, int rank) {
  if (step != kFirstStep || participant.first_prefix.empty()) {
    return participant.prefix + step + "/" + std::to_string(rank);
  }
  const uint64_t member = participant.members.empty()
                              ? static_cast<uint64_t>(rank)
                              : participant.members[static_cast<size_t>(rank)];
  return participant.first_prefix + step + "/" + std::to_string(member);
}

std::string count_key(const Participant& participant, const std::string& step) {
  return participant.prefix + step + "/count";
}

void remove_steps(const Participant& participant) {
  std::vector<std::string> keys;
  for (const std::string& step : *participant.steps) {
    if (step == kFirstStep) continue;
    keys.push_back(count_key(participant, step));
    for (const int rank : everyone(participant.size)) {
      keys.push_back(step_key(participant, step, rank));
    }
  }
  participant.store->remove(keys);
}

void require_not_aborted(const Participant& participant, KeyValue::Deadline deadline) {
  const auto end = participant.store->get(end_key(participant), deadline);
  if (!end) return;
  throw ProblemElsewhere(end->substr(1),
                         end->front() == kLate ? ErrorKind::kTimeout : ErrorKind::kUnavailable);
}

bool abort_formation(const Participant& participant, const std::string& why) {
  const std::string end = kUnable + why;
  const auto until = std::chrono::steady_clock::now() + kStoreAnswerTimeout;
  return participant.store->claim(end_key(participant), end, until) == end;
}

namespace {

// If all ranks have a record of the first step, their group may have been formed. Reports to these
// ranks that the group cannot be trusted.
void report_to_formed(const Participant& participant, const std::string& why) {
  if (!participant.watch) return;
  const auto until = std::chrono::steady_clock::now() + kStoreAnswerTimeout;
  std::string first;
  std::vector<std::string> mailboxes;
  for (int rank = 0; rank < participant.size; ++rank) {
    const auto record = participant.store->get(step_key(participant, kFirstStep, rank), until);
    if (!record) return;  // not formed
    const Claim claim = claim_of(*record);
    if (rank == 0) first = claim.process;
    mailboxes.push_back(claim.mailbox);
  }
  participant.watch->tell_claimed_twice(first, participant.prefix, mailboxes, why);
}

}  // namespace

void throw_claimed(const Participant& participant, const std::string& record) {
  const Claim holder = claim_of(record);
  const std::string rank = "rank " + std::to_string(participant.rank) + " of " + participant.group;
  const std::string cause =
      ": two processes have this rank, or two jobs use one store; start each rank once, and " +
      fresh_store_advice();
  const std::string remedy =
      has_ended(holder)
          ? ", which has ended: the store holds the keys of another job; " + fresh_store_advice()
          : cause;
  const std::string both = rank + " is taken by " + process_name(holder) + ", and " +
                           process_name(own_claim()) + " has come as the same rank" + cause;
  try {
    // A rank that waits sees the abort. A rank that has all records no longer waits: the spoilt
    // counter stops it.
    if (abort_formation(participant, both)) spoil(participant, kFirstCount);
    // A rank that has passed kFirstCount notices neither the abort nor the counter. It gets a
    // report that its group may consist of ranks of two jobs. If the jobs have different ids, no
    // report is needed: the ranks of the group have compared their ids.
    if (!has_ended(holder) && !is_another_job(holder.job, job_id()))
      report_to_formed(participant, both);
  } catch (const Error& unreachable) {
    warn_of_unreachable(unreachable);
  }
  throw ProblemElsewhere(rank + " is taken by " + process_name(holder) + remedy,
                         ErrorKind::kMismatch);
}

void require_own_claim(const Participant& participant, const std::string& record) {
  const Claim holder = claim_of(record);
  if (holder.process == process_id() || is_predecessor(holder)) return;
  throw_claimed(participant, record);
}

void throw_missing(const Participant& participant, const std::string& step,
                   const std::vector<int>& among) {
  const auto until = std::chrono::steady_clock::now() + kStoreAnswerTimeout;
  std::vector<int> absent;
  for (const int rank : among) {
    if (!participant.store->has({step_key(participant, step, rank)}, until)) absent.push_back(rank);
  }
  const std::string own =
      "rank " + std::to_string(participant.rank) + " of " + participant.group + " met ";
  if (absent.empty()) {
    throw Error(ErrorKind::kTimeout, own + "all " + std::to_string(among.size()) +
                                         " ranks, but the timeout came before the last of them "
                                         "was done (step: " +
                                         step + "); it is stopped, or has died");
  }
  throw Error(ErrorKind::kTimeout,
              own + std::to_string(among.size() - absent.size()) + " of " +
                  std::to_string(among.size()) + " ranks before the timeout (step: " + step +
                  "); missing ranks: " + list(participant, absent) + ". " + participant.advice);
}

std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::string> gather(const Participant& participant, const std::string& step,
                                const std::vector<int>& among,
                                const std::function<std::string()>& own_text,
                                const std::function<void(int, const std::string&)>& arrived) {
  if (participant.steps) participant.steps->insert(step);
  std::exception_ptr own;
  std::string published;
  bool is_death = false;
  try {
    published = make_record(step, kResult, own_text());
  } catch (const ProblemElsewhere& error) {
    own = std::current_exception();
    published = make_record(step, kRelayed, error.what());
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const Error*>(&error);
    is_death = ours != nullptr && ours->kind() == ErrorKind::kDeath;
    own = std::current_exception();
    published = make_record(step, kProblem, error.what());
  }
  std::vector<std::string> keys;
  for (const int rank : among) keys.push_back(step_key(participant, step, rank));
  if (own) {
    // Other ranks detect a death themselves, and do not wait for this record.
    if (!is_death) publish_last_record(participant, step, published, keys);
    std::rethrow_exception(own);  // with its own text and kind
  }
  leave_record(participant, step, published, participant.deadline);
  IncomingRecords incoming(participant, step, among, keys, published, arrived);
  AbortWatcher aborts(participant, among);
  if (!incoming.await([&] { aborts.check(); })) {
    throw_missing(participant, step, among);
  }

  const std::vector<std::string> records = incoming.all();
  std::vector<std::string> texts(static_cast<size_t>(participant.size));
  for (size_t i = 0; i < among.size(); ++i) {
    const std::string text = text_of(step, records[i]);
    if (records[i].front() == kRelayed) throw ProblemElsewhere(text);
    if (records[i].front() == kProblem) {
      throw ProblemElsewhere(problem_of(participant, among[i], text));
    }
    texts[static_cast<size_t>(among[i])] = text;
  }
  return texts;
}

void run_in_formation(const Participant& participant, const std::function<void()>& act) {
  try {
    act();
  } catch (const ProblemElsewhere&) {
    throw;  // the failing rank has published it
  } catch (const Error& error) {
    const bool is_late = error.kind() == ErrorKind::kTimeout;
    if (error.kind() != ErrorKind::kDeath && error.kind() != ErrorKind::kNetwork) {
      abort_with(participant, is_late ? kLate : kUnable, error.what());
    }
    throw;
  } catch (const std::bad_alloc&) {
    abort_with(participant, kUnable, "no memory is left");
    throw;
  } catch (const std::system_error& error) {  // no thread could be started
    abort_with(participant, kUnable, error.what());
    throw;
  } catch (...) {  // Ctrl-C
    abort_with(participant, kUnable, "its wait was interrupted");
    throw;
  }
}

void AbortWatcher::check() {
  const auto now = std::chrono::steady_clock::now();
  try {
    participant_.require_alive(among_);
  } catch (const Error&) {  // the dead rank may have aborted the formation before
    try {
      require_not_aborted(participant_, now + kDeathCauseTimeout);
    } catch (const ProblemElsewhere&) {
      throw;
    } catch (const Error&) {  // the store does not answer
    }
    throw;
  }
  if (now < next_ || now >= participant_.deadline) return;
  next_ = now + std::max(kAbortCheckPeriod, kAbortCheckPeriodPerRank * participant_.size);
  // The store has until the deadline to answer, so a slow store does not abort the formation.
  require_not_aborted(participant_, std::max(participant_.deadline, now + kStoreAnswerTimeout));
}

std::optional<std::string> await_published(const Participant& participant, const std::string& step,
                                           int rank, KeyValue::Deadline until) {
  const std::string key = step_key(participant, step, rank);
  const auto check = [&] { participant.require_alive(everyone(participant.size)); };
  try {
    const auto record = await_value(*participant.store, key, until, check, participant.deadline);
    if (!record || record->front() != kResult) return std::nullopt;
    return text_of(step, *record);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDeath) throw;
    return std::nullopt;
  }
}

}  // namespace hbm::bootstrap
