// Thresholds that the communicators share with one another and with the process group.
// Measure: `message_test`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::communicator {

// The number of a process's last groups over MPI whose names are kept for errors.
// Unit: groups
// Below: up to and including the value, an error names the group of a message.
// Above: an error has the number of an older group.
// Measure: `message_test --gtest_filter=GroupNames.RememberTheLastGroups`
inline constexpr size_t kRememberedGroupNames = 1024;

// The longest wait of a rank that destroys a group, in each of three steps. The rank passes the
// last barrier, publishes its reports, and tells the store that it leaves.
// Below: the rank waits.
// Above: the rank leaves all the same.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.StoreServerLeavesLast`
inline constexpr std::chrono::milliseconds kPartingTimeout{1000};

}  // namespace hbm::communicator
