#include "communicator/failure/monitored_group.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>

namespace hbm::communicator::failure {
namespace {

constexpr std::array<const char*, 7> kStates = {"meeting", "joining", "local",  "monitored",
                                                "leaving", "left",    "stopped"};  // as GroupState

}  // namespace

void MonitoredGroup::require(std::initializer_list<GroupState> legal, const char* call) const {
  if (std::ranges::find(legal, state) != legal.end()) return;
  throw std::logic_error("the failure monitor's " + std::string(call) +
                         " is not legal in the state " + kStates[static_cast<size_t>(state)] +
                         " of " + name);
}

}  // namespace hbm::communicator::failure
