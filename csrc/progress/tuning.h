// Thresholds of the operation queue: waits of the progress thread, workers, and the end of the
// process.
// Measure: `queue_test`

#pragma once

#include <chrono>
#include <cstdint>

namespace hbm::progress {

// -- The progress thread

// The period in which the progress thread, and every thread that waits for it, checks for Ctrl-C.
// The progress thread also checks for failures of other ranks in this period, and when the failure
// monitor has found a change.
// Below: a smaller value asks the failure detector and Python more often.
// Above: a larger value delays the error after Ctrl-C or a failure.
// Measure: `python -m benchmarks.failures`
inline constexpr std::chrono::milliseconds kWatchPeriod{250};

// The longest sleep of a progress thread that its peers can wake.
// Below: a smaller value wakes waiting ranks more often.
// Above: a larger value delays timeouts and kWatchPeriod's checks.
// Measure: `queue_claim_test --gtest_filter=QueueTest.WaitsEndAtTheDeadline`
inline constexpr std::chrono::milliseconds kLongestProgressThreadSleep{10};

// The time for which a thread polls an operation before it leaves the operation's callback to a
// worker. Waking the worker takes longer than this time.
// Below: the thread polls, and runs the callback itself if the operation ends.
// Above: a worker drives the operation and runs the callback.
// Measure: `pytest tests/python/collectives/test_callbacks.py`
inline constexpr std::chrono::microseconds kCallbackPollTime{20};

// The number of polls of a new synchronous operation before the clock is read. It is 1 if the ranks
// outnumber the processors. Reading the clock takes as long as a short operation within a node.
// Unit: polls
// Below: the next poll follows.
// Above: from the value on, the progress thread checks timeouts and aborts between polls, and
// sleeps.
// Measure: `python -m benchmarks.collectives --collectives allreduce --sizes 8`
inline constexpr int kPollsWithoutClock = 50;

// The pause before abort() interrupts the progress thread again.
// Below: a smaller value takes more processor time from the progress thread.
// Above: a larger value delays abort().
// Measure: `queue_failure_test --gtest_filter=QueueTest.AbortReachesTheRunningThreadAndItsWaiters`
inline constexpr std::chrono::milliseconds kAbortRetryPeriod{1};

// -- Workers

// The takeover delay of a self-sufficient operation: the time from its issue until the worker may
// drive it. Such an operation keeps no peer waiting.
// Below: threads that issue, test or wait for operations drive the operation.
// Above: from the value on, the worker drives it.
// Measure: `queue_test --gtest_filter=QueueTest.WorkerTakesOverUnawaitedOperations`
inline constexpr std::chrono::milliseconds kTakeoverDelay{50};

// The takeover delay of a message that waits for its peer.
// Below: threads that issue, test or wait for messages drive the message.
// Above: from the value on, the worker drives it.
// Measure: `queue_test
// --gtest_filter=UnorderedQueueTest.WorkerTakesOverUnawaitedMessages`
inline constexpr std::chrono::microseconds kMessageTakeoverDelay{200};

// The time after the last issue during which an idle leading worker checks for operations
// periodically, so that an issue need not wake it. A worker that does not lead waits as long for a
// chance to lead or for callbacks. If neither comes, the worker ends.
// Below: the leading worker checks for operations each kTakeoverDelay; others wait to lead.
// Above: from the value on, the leading worker sleeps until it is woken; the others end.
inline constexpr std::chrono::seconds kWorkerLingerTime{1};

// The time after the issue of a message that waits for its peer, during which an idle worker checks
// more often, because more such messages often follow.
// Below: the leading worker checks for operations each kMessageTakeoverDelay.
// Above: from the value on, the worker checks each kTakeoverDelay.
// Measure: `python -m benchmarks.collectives --collectives sendrecv`
inline constexpr std::chrono::milliseconds kMessageLingerTime{20};

// The period in which a worker that does not lead checks whether it may lead or end.
// Below: a smaller value wakes the worker more often.
// Above: a larger value ends the worker later.
inline constexpr std::chrono::milliseconds kFollowerCheckPeriod{20};

// -- The backoff of a polling progress thread

// The number of polls before a wait yields the processor: about 15 us of polling MPI. A wait yields
// from its first poll on if the ranks outnumber the processors.
// Unit: polls
// Below: the wait polls again.
// Above: from the value on, the wait yields between polls.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-mpi`
inline constexpr uint32_t kPollsBeforeYield = 64;

// The number of yields before a wait sleeps, if nothing ends its sleep early.
// Unit: yields
// Below: the wait yields and polls again, and so notices a message soon.
// Above: from the value on, the wait sleeps between polls.
// Measure: `queue_test --gtest_filter=Backoff.SleepsAloneIfNothingEndsASleep`
inline constexpr uint32_t kYieldsBeforeSleep = 2000;

// The number of yields before a wait sleeps, if messages end its sleep early.
// Unit: yields
// Below: the wait yields and polls again.
// Above: from the value on, the wait sleeps until a message comes.
// Measure: `queue_test --gtest_filter=Backoff.PollsLessAfterWaitsThatSlept`
inline constexpr uint32_t kYieldsBeforeWakeableSleep = 100;

// If messages end sleeps early, each wait that slept halves the number of polls and yields before
// the next wait sleeps. This value is the most halvings.
// Unit: halvings
// Below: the next wait polls half as often before it sleeps.
// Above: at the value, the number of polls stays.
// Measure: `queue_test --gtest_filter=Backoff.PollsLessAfterWaitsThatSlept`
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

// The number of sleeps of one length between polls. The sleeps after them are twice as long.
// Unit: sleeps
// Below: a smaller value delays a message that comes soon.
// Above: a larger value takes more processor time in a long wait.
// Measure: `queue_test --gtest_filter=Backoff.SleepsLongerUntilItIsReset`
inline constexpr uint32_t kSleepsPerDoubling = 16;

// The most doublings of the sleep after a wake-up by a part of a message. Each such sleep adds one
// doubling. During the sleep, more of the message arrives.
// Unit: doublings
// Below: the next such sleep is twice as long.
// Above: at the value, such sleeps grow no longer.
// Measure: `queue_test --gtest_filter=Backoff.SleepsAgainAfterAPartialWakeup`
inline constexpr uint32_t kMostWakeupDoublings = 6;

// The number of doublings of the sleep after a wake-up that are undone whenever an operation makes
// progress.
// Unit: doublings
// Below: a smaller value delays the next messages for longer.
// Above: a larger value receives a large message packet by packet.
// Measure: `queue_test --gtest_filter=Backoff.ForgetsPartialWakeupsSoon`
inline constexpr uint32_t kWakeupDoublingsUndone = 2;

// -- The end of the process

// The longest time for which the end of the process waits for progress threads. A poll never waits,
// so a thread that takes longer is copying gigabytes.
// Below: the end of the process waits for the progress thread to park.
// Above: from the value on, the process ends.
// Measure: `queue_end_test --gtest_filter=QueueEnd.NoThreadPollsOrReturnsAfterTheEnd`
inline constexpr std::chrono::seconds kProgressThreadEndTimeout{10};

// The longest time for which the end of the process waits for callbacks. The value is short,
// because a callback may wait for another rank.
// Below: the end of the process waits for the callback.
// Above: from the value on, the process ends.
// Measure: `queue_end_test --gtest_filter=QueueEnd.WaitsForARunningCallback`
inline constexpr std::chrono::seconds kCallbackEndTimeout{1};

// The period in which the end of the process checks the queues.
// Below: a smaller value takes more processor time from progress threads and callbacks.
// Above: a larger value delays the end of the process.
// Measure: `queue_end_test --gtest_filter=QueueEnd.NoThreadPollsOrReturnsAfterTheEnd`
inline constexpr std::chrono::milliseconds kQueueEndCheckPeriod{1};

}  // namespace hbm::progress
