// Thresholds of failure detection: the rounds at the store, liveness connections, and the wait for
// the cause of an error.
// Measure: `python -m benchmarks.failures`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::communicator::failure {

// -- Rounds at the store

// In a round, the failure monitor exchanges reports with other nodes through the store. This is the
// period of the rounds. The end of a process begins a round immediately.
// Below: a smaller value burdens the store.
// Above: a larger value delays the errors of ranks on other nodes.
inline constexpr std::chrono::milliseconds kRoundPeriod{250};

// The period of the rounds while the process connects to other nodes.
// Below: a smaller value burdens the store.
// Above: a larger value delays the connections.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::milliseconds kRoundPeriodWhileConnecting{20};

// The period of the rounds for kReportsTime after the end of a process, in a job of at most a
// hundred processes. A larger job has a period in proportion. Ranks that waited for the ended
// process report their failures in this time.
// Below: a smaller value burdens the store.
// Above: a larger value delays the errors of ranks that wait for these ranks.
// Measure: `python -m benchmarks.heal --layouts aabb`
inline constexpr std::chrono::milliseconds kRoundPeriodAfterDeath{10};

// The time after the end of a process in which reports of failures are likely.
// Below: rounds have the period kRoundPeriodAfterDeath.
// Above: rounds have the period kRoundPeriod.
// Measure: `python -m benchmarks.heal --layouts aabb`
inline constexpr std::chrono::milliseconds kReportsTime{500};

// The period of the rounds while this process leaves a group.
// Below: a smaller value burdens the store.
// Above: a larger value delays destroy_process_group().
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.StoreServerLeavesLast`
inline constexpr std::chrono::milliseconds kRoundPeriodWhileLeaving{2};

// The time that the store has at first to answer a question of a round. Each round without an
// answer doubles it.
// Below: the monitor waits.
// Above: the round ends without an answer, which proves no death.
// Measure: `pytest tests/python/failures/test_store_connection.py -k
// test_a_stopped_rank_is_not_dead`
inline constexpr std::chrono::milliseconds kRoundAnswerTimeout{200};

// The longest time that the store has to answer a question of a round. The round trip of a link to
// the store must be shorter.
// Below: the time doubles after a round without an answer.
// Above: it stays at the value. With a larger value the monitor of a job whose store is silent
// notices a death later.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.LeavesOverADistantStore`
inline constexpr std::chrono::milliseconds kLongestRoundAnswerTimeout{1600};

// The longest wait for a slow store while a group ends in which all ranks have arrived at the
// destruction. A distant store takes several round trips, and a silent name server delays each new
// connection to PyTorch's store for seconds.
// Below: the rank waits until the store has its entry. The rank that serves the store waits until
// the store has the entries of all ranks.
// Above: the rank leaves. If it serves the store, PyTorch prints a warning in ranks that still ask.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.WaitsForASlowStoreIfAllRanksLeave`
inline constexpr std::chrono::milliseconds kSlowStoreTimeout{60'000};

// If the store is silent, the rank of an ended process counts as dead after this time. Until then
// the monitor asks the store whether the rank had left before its process ended.
// Below: the monitor asks the store again.
// Above: the rank counts as dead.
// Measure: `pytest tests/python/failures/test_store_connection.py -k
// test_a_stopped_rank_is_not_dead`
inline constexpr std::chrono::milliseconds kSilentStoreDeathDelay{2000};

// The pause after the first question to a lost store.
// Below: a smaller value asks a store that has ended more often, and PyTorch prints for each.
// Above: with a larger value a rank notices later that a lost store answers again.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.AsksALostStoreEverLessOften`
inline constexpr std::chrono::milliseconds kFirstLostStorePause{250};

// The longest pause between two questions to a lost store.
// Below: the pause grows.
// Above: it stays at the value.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.AsksALostStoreEverLessOften`
inline constexpr std::chrono::milliseconds kLongestLostStorePause{3600 * 1000};

// An operation fails because the store is lost only if the store has not answered for this time.
// The store may have ended because a rank died, and an error that names this death is better.
// Below: the operation waits for the monitor to notice that death.
// Above: the operation fails: the store is gone.
// Measure: `pytest tests/python/failures/test_deaths.py -k test_death_of_the_store`
inline constexpr std::chrono::milliseconds kStoreLossGracePeriod{1000};

// The number of rounds in which the monitor asks for an entry that is not in the failure log yet. A
// writer first reserves a number, then writes the entry under this number, and may die in between.
// Unit: rounds
// Below: up to and including the value, the monitor asks for the entry again.
// Above: the monitor no longer asks for the entry.
// Measure: `failure_monitor_test`
inline constexpr int kRoundsForFailureEntry = 40;

// The longest letter to a claim mailbox. A letter reports the second claim of a rank.
// Unit: bytes
// Below: up to and including the value, the letter arrives whole.
// Above: the rest of the letter is lost.
// Measure: `pytest tests/python/failures/test_meeting.py -k
// test_a_second_claim_ends_the_formed_group`
inline constexpr size_t kLongestLetterBytes = 4096;

// -- Liveness connections

// The time that a process has to make a liveness connection to its group's rank 0, if rank 0 is on
// another node.
// Below: the process tries to connect to the listener of rank 0, again after each failure.
// Above: the process continues without the connection.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::milliseconds kConnectionTimeout{6000};

// The longest wait until the monitor's thread has opened the listener. The thread cannot be woken
// if the process had no descriptor left for the thread's eventfd.
// Below: the group waits for the listener's address.
// Above: the group is formed without a listener.
// Measure: `pytest tests/python/failures/test_store_connection.py -k
// test_too_few_descriptors_are_named`
inline constexpr std::chrono::milliseconds kListenTimeout{1000};

// The time that a process (the caller) has to connect to one address of another process' listener.
// Below: the caller waits.
// Above: from the value on, the caller tries the next address.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::milliseconds kAddressConnectTimeout{500};

// The time that a caller has to say which process it is.
// Below: the listener waits.
// Above: from the value on, the listener closes the connection.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k
// test_a_death_in_init_leaves_no_listener`
inline constexpr std::chrono::milliseconds kHelloTimeout{5000};

// The time that the listener's process has to reply to a caller's greeting. That process may be
// busy or stopped.
// Below: the caller waits.
// Above: from the value on, the caller tries the next address.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::milliseconds kHelloReplyTimeout{60'000};

// The pause of the listener after the process had no descriptor left for a caller.
// Below: the caller waits in the kernel's queue.
// Above: from the value on, the listener accepts callers again.
// Measure: `pytest tests/python/failures/test_store_connection.py -k
// test_too_few_descriptors_are_named`
inline constexpr std::chrono::milliseconds kAcceptPause{200};

// The most callers that have not said yet which process they are.
// Unit: callers
// Below: the listener accepts the next caller.
// Above: from the value on, the listener closes the next caller's connection.
// Measure: `python -m benchmarks.scaling`
inline constexpr size_t kMostUnknownCallers = 64;

// The period in which the kernel probes the other end of a connection.
// Unit: s
// Below: a smaller value sends more packets.
// Above: a larger value delays the error after a machine or a link was lost.
// Measure: `pytest tests/python/failures/test_cut_link.py`
inline constexpr int kProbePeriodSeconds = 1;

// The silence after which the kernel itself ends a connection: a day. A rank that waits for the
// silent machine raises an error long before, after its heartbeat_timeout.
// Unit: ms
// Below: the connection stays, and work continues when the machine answers again.
// Above: the kernel ends the connection, and the other process counts as dead.
// Measure: `pytest tests/python/failures/test_cut_link.py -k
// test_work_continues_when_the_link_is_back`
inline constexpr unsigned kKernelTimeoutMilliseconds = 24 * 3600 * 1000;

// -- The cause of an error

// The wait for the cause of an error of MPI. Most such errors follow from a death that MPI does not
// name.
// Below: the rank looks for a death or a failure report.
// Above: the rank raises MPI's error.
// Measure: `pytest tests/python/failures/test_deaths.py -k test_death_over_mpi`
inline constexpr std::chrono::milliseconds kCauseTimeout{1500};

// The time for which a rank looks for a death once the store is gone, or a machine is silent.
// Below: the rank looks for a death, which would be the cause.
// Above: the rank raises the loss of the store, or the silence.
// Measure: `pytest tests/python/failures/test_deaths.py -k test_death_of_the_store`
inline constexpr std::chrono::milliseconds kDeathSightTimeout{700};

// The wait, after a timeout, for the report of the late rank on this node. That rank may itself
// wait for a third rank, which its report names.
// Below: the rank waits for the report.
// Above: the rank raises its own timeout, which names the late rank.
// Measure: `pytest tests/python/failures/test_deaths.py -k
// test_a_timeout_names_the_rank_that_others_wait_for`
inline constexpr std::chrono::milliseconds kLocalPeerReportTimeout{500};

// The wait for the report of the sender of an oversized message. The sender mostly knows both
// operations.
// Below: the rank waits for the report.
// Above: the error has only this rank's operation.
// Measure: `pytest tests/python/failures/test_oversized_message.py`
inline constexpr std::chrono::milliseconds kSenderReportTimeout{500};

// The period in which a rank that waits for the cause of an error checks for it.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the error.
inline constexpr std::chrono::milliseconds kCauseCheckPeriod{20};

// The time for a failure report to reach the store before the rank raises its error.
// Below: the rank waits until the report is published.
// Above: the rank raises its error. The monitor publishes the report later.
// Measure: `failure_monitor_test --gtest_filter=FailureMonitor.LeavingAFailedGroupPublishesFirst`
inline constexpr std::chrono::milliseconds kReportPublishTimeout{200};

// The time for which a rank looks for an ended process after it has lost a connection. When a
// process dies, its connections may be closed some time before the kernel shows its end.
// Below: the rank looks for a process that has ended, to name it.
// Above: the error names no death.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k
// test_death_of_the_stores_host_in_init`
inline constexpr std::chrono::milliseconds kDeathProofTimeout{300};

// The period in which a rank looks for an ended process after it has lost a connection.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the error.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k
// test_death_of_the_stores_host_in_init`
inline constexpr std::chrono::milliseconds kDeathProofCheckPeriod{10};

}  // namespace hbm::communicator::failure
