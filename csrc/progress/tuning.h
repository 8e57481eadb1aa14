// Thresholds of the queue of operations: waits of a driver, workers, and the end of the process.
// Measure: `queue_test`

#pragma once

#include <chrono>
#include <cstdint>

namespace hbm {

// -- The driver

// The period in which a driver, or a thread that waits for another one to drive, checks for Ctrl-C.
// A driver also checks for failures of other ranks.
// Below: a smaller value asks the failure detector and Python more often.
// Above: a larger value delays the error after Ctrl-C or a failure.
// Measure: `python -m benchmarks.failures`
inline constexpr std::chrono::milliseconds kWatchPeriod{250};

// The longest sleep of a driver that its peers can wake.
// Below: a smaller value wakes waiting ranks more often.
// Above: a larger value delays timeouts and kWatchPeriod's checks.
// Measure: `queue_claim_test --gtest_filter=QueueTest.NobodyWaitsBeyondTheDeadline`
inline constexpr std::chrono::milliseconds kLongestDriverSleep{10};

// The time for which a thread polls an operation before it leaves the operation's callback to a
// worker. Waking the worker costs more.
// Below: the thread polls, and runs the callback itself if the operation ends.
// Above: a worker drives the operation and runs the callback.
// Measure: `pytest tests/python/collectives/test_callbacks.py`
inline constexpr std::chrono::microseconds kCallbackPollTime{20};

// The polls of a new synchronous operation before the clock is read, or one poll if the ranks
// outnumber the processors. Reading the clock takes as long as a small operation within a node.
// Unit: polls
// Below: the next poll follows.
// Above: from the value on, the driver checks timeouts and aborts between polls, and sleeps.
// Measure: `python -m benchmarks.collectives --collectives allreduce --sizes 8`
inline constexpr int kPollsWithoutClock = 50;

// The pause before abort() interrupts the driver again.
// Below: a smaller value takes more processor time from the driver.
// Above: a larger value delays abort().
// Measure: `queue_failure_test --gtest_filter=QueueTest.AbortReachesADrivingThreadAndItsWaiters`
inline constexpr std::chrono::milliseconds kAbortRetryPeriod{1};

// -- Workers

// The time for which the worker leaves a small operation to the thread that issued it. Such an
// operation keeps no peer waiting.
// Below: only a thread that waits for the operation drives it.
// Above: from the value on, the worker drives it.
// Measure: `queue_test --gtest_filter=QueueTest.TheWorkerAdoptsWhatNobodyWaitsFor`
inline constexpr std::chrono::milliseconds kAdoptionPatience{50};

// The same time for a large message.
// Below: only a thread that waits for the message drives it.
// Above: from the value on, the worker drives it.
// Measure: `queue_test
// --gtest_filter=UnorderedQueueTest.TheWorkerAdoptsALargeMessageThatNobodyWaitsFor`
inline constexpr std::chrono::microseconds kMessageAdoptionPatience{200};

// The time since the last issue for which an idle worker stays half awake, so that issuing needs no
// wake-up.
// Below: the leading worker checks for operations each kAdoptionPatience; another worker waits for
// its turn.
// Above: from the value on, the leading worker sleeps until it is woken; another worker ends.
inline constexpr std::chrono::seconds kWorkerLingerTime{1};

// The same after a large message, of which more often follow.
// Below: the leading worker checks for operations each kMessageAdoptionPatience.
// Above: from the value on, it checks each kAdoptionPatience.
// Measure: `python -m benchmarks.collectives --collectives sendrecv`
inline constexpr std::chrono::milliseconds kMessageLingerTime{20};

// The period in which a worker that does not lead checks whether it may lead or end.
// Below: a smaller value wakes the worker more often.
// Above: a larger value ends the worker later.
inline constexpr std::chrono::milliseconds kFollowerCheckPeriod{20};

// -- The backoff of a polling driver

// Polls before a wait yields the processor: about 15 us of polling MPI. There are none if
// the ranks outnumber the processors.
// Unit: polls
// Below: the wait polls again.
// Above: from the value on, the wait yields between polls.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-mpi`
inline constexpr uint32_t kPollsBeforeYield = 64;

// Yields before a wait sleeps, if nothing ends its sleep early.
// Unit: yields
// Below: the wait yields and polls again, and so notices a message soon.
// Above: from the value on, the wait sleeps between polls.
// Measure: `queue_test --gtest_filter=Backoff.SleepsByItselfWhereNothingEndsASleep`
inline constexpr uint32_t kYieldsBeforeSleep = 2000;

// The same if messages end its sleep.
// Unit: yields
// Below: the wait yields and polls again.
// Above: from the value on, the wait sleeps until a message comes.
// Measure: `queue_test --gtest_filter=Backoff.LooksLessAfterWaitsThatCameToSleep`
inline constexpr uint32_t kYieldsBeforeWakeableSleep = 100;

// The most halvings of the polls and yields before a sleep that messages end. Each wait that came
// to sleep adds one.
// Unit: halvings
// Below: the next wait polls half as often before it sleeps.
// Above: at the value, the number of polls stays.
// Measure: `queue_test --gtest_filter=Backoff.LooksLessAfterWaitsThatCameToSleep`
inline constexpr uint32_t kMostPollHalvings = 6;

// The first sleep between polls. The kernel's timer slack adds about 50 us.
// Below: a smaller value takes more processor time.
// Above: a larger value delays a message.
// Measure: `queue_test --gtest_filter=Backoff.SleepsLongerUntilItIsReset`
inline constexpr std::chrono::microseconds kShortestBackoffSleep{20};

// The longest sleep between polls.
// Below: sleeps double.
// Above: sleeps stay at the value.
// Measure: `queue_test --gtest_filter=Backoff.SleepsLongerUntilItIsReset`
inline constexpr std::chrono::microseconds kLongestBackoffSleep{1000};

// Sleeps between polls before the next ones are twice as long.
// Unit: sleeps
// Below: a smaller value delays a message that comes soon.
// Above: a larger value takes more processor time in a long wait.
// Measure: `queue_test --gtest_filter=Backoff.SleepsLongerUntilItIsReset`
inline constexpr uint32_t kSleepsPerDoubling = 16;

// The most doublings of the sleep that follows one which a part of a message ended. Each such sleep
// adds one. During the sleep, more of the message comes.
// Unit: doublings
// Below: the next such sleep is twice as long.
// Above: at the value, such sleeps stay as long.
// Measure: `queue_test --gtest_filter=Backoff.LeavesMoreToComeAfterASleepThatWasEndedInVain`
inline constexpr uint32_t kMostVainDoublings = 6;

// The doublings that each progress of the operations takes back.
// Unit: doublings
// Below: a smaller value delays the next messages for longer.
// Above: a larger value takes a large message in packet by packet.
// Measure: `queue_test --gtest_filter=Backoff.ForgetsSoonThatSleepsWereEndedInVain`
inline constexpr uint32_t kVainDoublingsUndone = 2;

// -- The end of the process

// The longest wait for threads that drive. A poll never waits, so a driver that takes longer copies
// gigabytes.
// Below: the end of the process waits for the driver to park.
// Above: from the value on, the process ends.
// Measure: `queue_end_test --gtest_filter=QueueEnd.NoThreadPollsOrReturns`
inline constexpr std::chrono::seconds kDriverEndPatience{10};

// The longest wait for callbacks. One of them may wait for another rank.
// Below: the end of the process waits for the callback.
// Above: from the value on, the process ends.
// Measure: `queue_end_test --gtest_filter=QueueEnd.WaitsForACallbackThatRuns`
inline constexpr std::chrono::seconds kCallbackEndPatience{1};

// The period in which the end of the process checks the queues.
// Below: a smaller value takes more processor time from drivers and callbacks.
// Above: a larger value delays the end of the process.
// Measure: `queue_end_test --gtest_filter=QueueEnd.NoThreadPollsOrReturns`
inline constexpr std::chrono::milliseconds kQueueEndCheckPeriod{1};

}  // namespace hbm
