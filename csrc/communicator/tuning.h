// Thresholds that the communicators share with one another and with the process group.
// Measure: `message_test`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::communicator {

// A process remembers the names of this many groups over MPI, the latest ones. A message of an
// earlier group may arrive in a later group, and the error then names the earlier group.
// Unit: groups
// Below: for one of these latest groups, the error has the name.
// Above: for an older group, the error has the number of the group.
// Measure: `message_test --gtest_filter=GroupNames.RememberTheLastGroups`
inline constexpr size_t kRememberedGroupNames = 1024;

// A rank destroys a group in two steps: it passes the last barrier, then publishes in the store
// that it leaves. This is the longest wait in each step. In a failed group the rank only publishes
// its failure reports.
// Below: the rank waits until the step is complete.
// Above: the rank leaves, although the step is not complete.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.StoreServerLeavesLast`
inline constexpr std::chrono::milliseconds kPartingTimeout{1000};

}  // namespace hbm::communicator
