#include "communicator/failure/failure_log.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include "communicator/failure/tuning.h"

namespace hbm::communicator::failure {
namespace {

constexpr const char* kCount = "hbm/failures/count";
constexpr const char* kEntry = "hbm/failures/";  // + number, from 1 on

constexpr std::array<const char*, 4> kKinds = {"death", "failure", "closing",
                                               "claimed twice"};  // as FailureKind

}  // namespace

std::string format(const FailureEntry& entry) {
  return std::string(kKinds[static_cast<size_t>(entry.kind)]) + "\n" + entry.about + "\n" +
         entry.text;
}

std::optional<FailureEntry> parse(const std::string& record) {
  const size_t kind = record.find('\n');
  if (kind == std::string::npos) return std::nullopt;
  const size_t about = record.find('\n', kind + 1);
  const auto index = std::ranges::find(kKinds, record.substr(0, kind)) - kKinds.begin();
  if (about == std::string::npos || static_cast<size_t>(index) == kKinds.size()) {
    return std::nullopt;
  }
  return FailureEntry{static_cast<FailureKind>(index), record.substr(kind + 1, about - kind - 1),
                      record.substr(about + 1)};
}

void FailureLog::exchange(std::deque<FailureEntry>& entries, std::chrono::milliseconds answer_time,
                          const std::function<void(const FailureEntry&)>& heard) {
  const auto soon = [&] { return std::chrono::steady_clock::now() + answer_time; };
  while (!entries.empty()) {
    const long number = store_->add(kCount, 1, soon());
    store_->set(kEntry + std::to_string(number), format(entries.front()), soon());
    entries.pop_front();
  }
  const long count = std::stol(store_->get(kCount, soon()).value_or("0"));
  for (; read_ < count; ++read_) missing_.emplace(read_ + 1, 0);
  for (auto each = missing_.begin(); each != missing_.end();) {
    const auto record = store_->get(kEntry + std::to_string(each->first), soon());
    if (record) {
      if (const auto entry = parse(*record)) heard(*entry);
    }
    each =
        record || ++each->second > kRoundsForFailureEntry ? missing_.erase(each) : std::next(each);
  }
}

}  // namespace hbm::communicator::failure
