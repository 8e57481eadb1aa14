#include "bootstrap/gather.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/log.h"

namespace hbm::bootstrap {
namespace {

// The first character of a rank's record.
constexpr char kResult = '+';
constexpr char kProblem = '!';
constexpr char kRelayed = '>';  // a problem of another rank, which the text names

// Lets the others read why this rank fails: the store may end with its process.
constexpr std::chrono::seconds kLastWords{5};
constexpr std::chrono::seconds kLookPatience{1};  // for who has come, after the deadline

class ProblemElsewhere : public Error {
 public:
  explicit ProblemElsewhere(const std::string& text) : Error(ErrorKind::kUnavailable, text) {}
};

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void say_last_words(const Participant& participant, const std::string& key,
                    const std::string& problem, const std::vector<std::string>& others) {
  try {
    const auto until = std::min(participant.deadline, std::chrono::steady_clock::now() + kLastWords);
    participant.store->set(key, problem, until);
    await_keys(*participant.store, others, until);
  } catch (const Error& unreachable) {
    log::warn(std::string("cannot tell the other ranks why this one fails: ") + unreachable.what());
  }
}

[[noreturn]] void missed(const Participant& participant, const std::string& step,
                         const std::vector<int>& among, const std::vector<std::string>& keys) {
  const auto until = std::chrono::steady_clock::now() + kLookPatience;
  std::vector<int> absent;
  for (size_t i = 0; i < among.size(); ++i) {
    if (!participant.store->has({keys[i]}, until)) absent.push_back(among[i]);
  }
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(participant.rank) + " of " + participant.group + " met " +
                  std::to_string(among.size() - absent.size()) + " of " +
                  std::to_string(among.size()) + " ranks before the timeout (step: " + step +
                  "); missing ranks: " + list(absent) +
                  ". Did they start, and with the same world size?");
}

}  // namespace

std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::string> gather(const Participant& participant, const std::string& step,
                                const std::vector<int>& among,
                                const std::function<std::string()>& tell) {
  std::exception_ptr own;
  std::string told;
  try {
    told = kResult + tell();
  } catch (const ProblemElsewhere& error) {
    own = std::current_exception();
    told = kRelayed + std::string(error.what());
  } catch (const std::exception& error) {
    own = std::current_exception();
    told = kProblem + std::string(error.what());
  }
  const std::string prefix = participant.prefix + step + "/";
  const std::string own_key = prefix + std::to_string(participant.rank);
  std::vector<std::string> keys;
  for (const int rank : among) keys.push_back(prefix + std::to_string(rank));
  if (own) {
    say_last_words(participant, own_key, told, keys);
    std::rethrow_exception(own);  // in its own words and of its own kind
  }
  participant.store->set(own_key, told, participant.deadline);
  if (!await_keys(*participant.store, keys, participant.deadline)) {
    missed(participant, step, among, keys);
  }

  std::vector<std::string> heard(static_cast<size_t>(participant.size));
  for (size_t i = 0; i < among.size(); ++i) {
    const std::string record = participant.store->get(keys[i], participant.deadline + kLookPatience).value();
    const std::string text = record.substr(1);
    if (record.front() == kRelayed) throw ProblemElsewhere(text);
    if (record.front() == kProblem) {
      throw ProblemElsewhere("rank " + std::to_string(among[i]) + " of " + participant.group +
                             " cannot take part: " + text);
    }
    heard[static_cast<size_t>(among[i])] = text;
  }
  return heard;
}

}  // namespace hbm::bootstrap
