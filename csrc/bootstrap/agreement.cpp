#include "bootstrap/agreement.h"

#include <algorithm>
#include <chrono>

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The counter behind a step adds up, in fields of this width: who vouches for each fact, who has
// come.
constexpr int kFieldBits = 20;
constexpr long kField = (1L << kFieldBits) - 1;

constexpr milliseconds kUsual{200};      // after which a rank tells the others that it is there
constexpr milliseconds kPatience{1000};  // for the store's answer to that

long field(long sum, int number) { return (sum >> (kFieldBits * number)) & kField; }

std::string verdict_key(const Participant& participant, const std::string& step) {
  return participant.prefix + step + "/all";
}

}  // namespace

void vouch(const Participant& participant, const std::string& step, unsigned facts) {
  long own = 1L << (kFieldBits * kMostFacts);
  for (int fact = 0; fact < kMostFacts; ++fact) {
    if (((facts >> fact) & 1) != 0) own += 1L << (kFieldBits * fact);
  }
  const long sum =
      participant.store->add(participant.prefix + step + "/count", own, participant.deadline);
  if (field(sum, kMostFacts) != participant.size) return;
  unsigned common = 0;  // this rank is the last
  for (int fact = 0; fact < kMostFacts; ++fact) {
    if (field(sum, fact) == participant.size) common |= 1U << fact;
  }
  participant.store->set(verdict_key(participant, step), std::to_string(common),
                         participant.deadline);
}

unsigned held_by_all(const Participant& participant, const std::string& step) {
  const std::vector<int> all = everyone(participant.size);
  const auto usual = steady_clock::now() + kUsual;
  bool has_told = false;
  const auto look = [&] {
    const auto now = steady_clock::now();
    if (!has_told && now >= std::min(usual, participant.deadline)) {
      participant.store->set(step_key(participant, step, participant.rank), "",
                             std::max(participant.deadline, now + kPatience));
      has_told = true;
    }
    participant.require_alive(all);
  };
  const std::string key = verdict_key(participant, step);
  if (!await_keys(*participant.store, {key}, participant.deadline, look)) {
    throw_missing(participant, step, all);
  }
  const auto verdict = participant.store->get_all({key}, participant.deadline + kPatience);
  return static_cast<unsigned>(std::stoul(verdict.front()));
}

}  // namespace hbm::bootstrap
