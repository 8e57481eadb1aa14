#include "bootstrap/agreement.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/tuning.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The counter of a step is an integer made of fields of this many bits. One field for each fact
// counts the ranks on which the fact holds. The last field counts the ranks that arrived.
constexpr int kFieldBits = 20;
constexpr long kField = (1L << kFieldBits) - 1;

constexpr long kSpoilt = kField;  // more than any number of ranks

long field(long sum, int number) { return (sum >> (kFieldBits * number)) & kField; }

// Returns the number of ranks that arrived. If the step is spoilt, the number is larger than the
// size of any group.
long arrived(long sum) { return sum >> (kFieldBits * kMostFacts); }

// Returns the facts that hold on all ranks; nothing while ranks are missing.
std::optional<unsigned> common_facts(const Participant& participant, long sum) {
  if (arrived(sum) != participant.size) return std::nullopt;
  unsigned common = 0;
  for (int fact = 0; fact < kMostFacts; ++fact) {
    if (field(sum, fact) == participant.size) common |= 1U << fact;
  }
  return common;
}

std::optional<unsigned> read_common_facts(const Participant& participant, const std::string& step,
                                          KeyValue::Deadline deadline) {
  const auto sum = participant.store->get(count_key(participant, step), deadline);
  return sum ? common_facts(participant, std::stol(*sum)) : std::nullopt;
}

// Waits until every rank that has added to the counter has also written its key, at most
// kCountedRankTimeout. So an error does not name a rank that has just arrived. Returns true if all
// ranks have added to the counter.
bool await_counted_ranks(const Participant& participant, const std::string& step) {
  const auto until = steady_clock::now() + kCountedRankTimeout;
  const long sum =
      std::stol(participant.store->get(count_key(participant, step), until).value_or("0"));
  const long all = arrived(sum);
  std::vector<int> silent = everyone(participant.size);
  for (;;) {
    std::erase_if(silent, [&](int rank) {
      return participant.store->has({step_key(participant, step, rank)},
                                    until + kStoreAnswerTimeout);
    });
    const auto named = participant.size - static_cast<long>(silent.size());
    if (named >= all || steady_clock::now() >= until) return all == participant.size;
    std::this_thread::sleep_for(kCountedRankCheckPeriod);
  }
}

}  // namespace

std::optional<unsigned> vouch(const Participant& participant, const std::string& step,
                              unsigned facts) {
  if (participant.steps) participant.steps->insert(step);
  long own = 1L << (kFieldBits * kMostFacts);
  for (int fact = 0; fact < kMostFacts; ++fact) {
    if (((facts >> fact) & 1) != 0) own += 1L << (kFieldBits * fact);
  }
  return common_facts(
      participant, participant.store->add(count_key(participant, step), own, participant.deadline));
}

void spoil(const Participant& participant, const std::string& step) {
  participant.store->add(count_key(participant, step), kSpoilt << (kFieldBits * kMostFacts),
                         steady_clock::now() + kStoreAnswerTimeout);
}

unsigned held_by_all(const Participant& participant, const std::string& step) {
  const std::vector<int> all = everyone(participant.size);
  const auto nameless_until = steady_clock::now() + kNamelessWait;
  bool has_named_itself = false;
  AbortWatcher aborts(participant, all);
  const auto check = [&] {
    const auto now = steady_clock::now();
    if (!has_named_itself && now >= std::min(nameless_until, participant.deadline)) {
      participant.store->set(step_key(participant, step, participant.rank), "",
                             std::max(participant.deadline, now + kStoreAnswerTimeout));
      has_named_itself = true;
    }
    aborts.check();
  };
  std::optional<unsigned> common;
  const auto found = [&](KeyValue::Deadline answer_by) {
    common = read_common_facts(participant, step, answer_by);
    return common.has_value();
  };
  const Awaited arrival_of_all{{count_key(participant, step)},
                               static_cast<long>(participant.size) << (kFieldBits * kMostFacts)};
  if (!await_answer(*participant.store, arrival_of_all, found, participant.deadline, check)) {
    const bool all_came = await_counted_ranks(participant, step);
    if (!all_came || !found(steady_clock::now() + kStoreAnswerTimeout)) {
      throw_missing(participant, step, all);
    }
  }
  return *common;
}

}  // namespace hbm::bootstrap
