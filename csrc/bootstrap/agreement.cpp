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

// The counter behind a step adds up, in fields of this width: who vouches for each fact, who has
// come.
constexpr int kFieldBits = 20;
constexpr long kField = (1L << kFieldBits) - 1;

constexpr long kSpoilt = kField;  // more than come

long field(long sum, int number) { return (sum >> (kFieldBits * number)) & kField; }

// How many have come; more than there are ranks if the step is spoilt.
long come(long sum) { return sum >> (kFieldBits * kMostFacts); }

// Returns the facts that hold on all ranks; nothing as long as some have not come.
std::optional<unsigned> common_facts(const Participant& participant, long sum) {
  if (come(sum) != participant.size) return std::nullopt;
  unsigned common = 0;
  for (int fact = 0; fact < kMostFacts; ++fact) {
    if (field(sum, fact) == participant.size) common |= 1U << fact;
  }
  return common;
}

std::optional<unsigned> look(const Participant& participant, const std::string& step,
                             KeyValue::Deadline deadline) {
  const auto sum = participant.store->get(count_key(participant, step), deadline);
  return sum ? common_facts(participant, std::stol(*sum)) : std::nullopt;
}

// Waits until all who have come have told so, or a moment is over, so that nobody takes one of them
// for missing. Returns whether these are all ranks.
bool await_those_who_came(const Participant& participant, const std::string& step) {
  const auto until = steady_clock::now() + kCountedRankPatience;
  const long sum =
      std::stol(participant.store->get(count_key(participant, step), until).value_or("0"));
  const long all = come(sum);
  std::vector<int> silent = everyone(participant.size);
  for (;;) {
    std::erase_if(silent, [&](int rank) {
      return participant.store->has({step_key(participant, step, rank)},
                                    until + kStoreAnswerPatience);
    });
    const auto told = participant.size - static_cast<long>(silent.size());
    if (told >= all || steady_clock::now() >= until) return all == participant.size;
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
                         steady_clock::now() + kStoreAnswerPatience);
}

unsigned held_by_all(const Participant& participant, const std::string& step) {
  const std::vector<int> all = everyone(participant.size);
  const auto nameless_until = steady_clock::now() + kNamelessWait;
  bool has_told = false;
  Lookout lookout(participant, all);
  const auto check = [&] {
    const auto now = steady_clock::now();
    if (!has_told && now >= std::min(nameless_until, participant.deadline)) {
      participant.store->set(step_key(participant, step, participant.rank), "",
                             std::max(participant.deadline, now + kStoreAnswerPatience));
      has_told = true;
    }
    lookout.look();
  };
  std::optional<unsigned> common;
  const auto found = [&](KeyValue::Deadline patience) {
    common = look(participant, step, patience);
    return common.has_value();
  };
  if (!await_answer(found, participant.deadline, check)) {
    const bool all_came = await_those_who_came(participant, step);
    if (!all_came || !found(steady_clock::now() + kStoreAnswerPatience)) {
      throw_missing(participant, step, all);
    }
  }
  return *common;
}

}  // namespace hbm::bootstrap
