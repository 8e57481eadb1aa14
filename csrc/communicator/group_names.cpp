#include "communicator/group_names.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

#include "base/fork.h"
#include "communicator/tuning.h"

namespace hbm::communicator {
namespace {

struct GroupNames {
  std::mutex mutex;  // guards `last`
  std::deque<std::pair<uint64_t, std::string>> last;
};

}  // namespace

void name_group(uint64_t number, const std::string& group) {
  auto& names = per_process<GroupNames>();
  const std::lock_guard lock(names.mutex);
  if (names.last.size() == kRememberedGroupNames) names.last.pop_front();
  names.last.emplace_back(number, group);
}

std::string name_of_group(uint64_t number) {
  auto& names = per_process<GroupNames>();
  const std::lock_guard lock(names.mutex);
  const auto found =
      std::ranges::find(names.last, number, [](const auto& one) { return one.first; });
  return found != names.last.end() ? found->second : "a group of number " + std::to_string(number);
}

}  // namespace hbm::communicator
