// Thresholds of waits, threads, links and the end of a process.
// Measure: `waiting_test`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm {

// -- Waits

// The time for which spin() polls before its caller sleeps. Waking a sleeping thread takes tens of
// microseconds on an idle processor, especially a virtual one. The answer may come sooner.
// Below: the thread polls, and yields its processor between two polls.
// Above: spin() returns false, and the thread sleeps until it is woken.
// Measure: `python -m benchmarks.collectives --collectives allreduce --sizes 8`
inline constexpr std::chrono::microseconds kSpinBeforeSleep{50};

// The time between two polls from which the thread counts as preempted. The value is less than a
// time slice of Linux' scheduler, and more than an interrupt takes.
// Below: the wait polls again.
// Above: from the value on, the wait sleeps, and so do the next waits of the process.
// Measure: `waiting_test --gtest_filter=SpinBudget.IsSpentAfterLosingTheProcessor`
inline constexpr std::chrono::microseconds kPreemptedAfter{500};

// The time for which waits sleep without polling after a wait has lost its processor, as a multiple
// of the time lost. Afterwards waits poll again. If a wait soon loses its processor again, the next
// time without polls is at least twice as long. Soon means within a time as long as the last time
// without polls.
// Unit: times the lost time
// Below: a smaller value polls on a busy processor sooner, and loses more time slices.
// Above: a larger value sleeps longer on a processor that has become free.
// Measure: `waiting_test --gtest_filter=SpinBudget.LaterWaitsSleepImmediatelyForAWhile`
inline constexpr int kSleepPerPreemption = 8;

// The longest time for which waits sleep without polling.
// Below: waits sleep for the time that kSleepPerPreemption gives.
// Above: waits sleep for the value, and then poll again.
// Measure: `python -m benchmarks.collectives.busy`
inline constexpr std::chrono::seconds kLongestTimeWithoutPolls{2};

// -- Threads

// The period in which a thread that waits for a call on another thread runs its `check`.
// Below: a smaller value wakes waiting threads more often.
// Above: a larger value delays the error after Ctrl-C or a death.
// Measure: `pytest tests/python/failures/test_store_connection.py`
inline constexpr std::chrono::milliseconds kCallCheckPeriod{10};

// The longest time for which a caller waits for a background thread that it has asked to end.
// Below: the caller waits for the thread.
// Above: the caller returns, and the thread keeps its memory until it ends.
// Measure: `pytest tests/python/failures/test_process_end.py`
inline constexpr std::chrono::milliseconds kThreadEndTimeout{1000};

// The stack that a thread is assumed to need if the default size cannot be read. If the process has
// less address space left, an error names the limit of address space.
// Unit: bytes
// Below: up to and including the value, the error names RLIMIT_AS.
// Above: if more address space is left, the error names the limits on threads.
// Measure: `pytest tests/python/failures/test_surroundings.py`
inline constexpr size_t kAssumedStackBytes = 8 << 20;

// -- The end of a process

// The longest wait, at the end of the process, for short sections of threads that have not parked.
// Below: the end waits for the sections.
// Above: the process ends while sections are still running.
// Measure: `pytest tests/python/failures/test_process_end.py`
inline constexpr std::chrono::seconds kFinalSectionTimeout{10};

// The period in which the end of the process counts the sections.
// Below: a smaller value takes more processor time from the sections.
// Above: a larger value delays the end of the process.
// Measure: `pytest tests/python/failures/test_process_end.py`
inline constexpr std::chrono::milliseconds kFinalSectionCheckPeriod{1};

// -- Files and descriptors

// The age from which a socket file that refuses connections belongs to an ended process. Younger
// files may refuse too, because a starting process makes the file first and listens later.
// Below: the file stays.
// Above: the file is removed.
// Measure: `pytest tests/python/failures/test_left_behind.py`
inline constexpr std::chrono::minutes kLongestSocketStart{1};

// An error names the limit of open files if at most this many descriptors are left. The value is
// not 0, because the failed call may have closed its own descriptors before they are counted.
// Unit: descriptors
// Below: up to and including the value, the error says to raise `ulimit -n`.
// Above: the error keeps its own cause.
// Measure: `pytest tests/python/failures/test_store_connection.py -k
// test_too_few_descriptors_are_named`
inline constexpr int kFewDescriptorsLeft = 8;

// The most sockets that a forked child closes, so that they do not stay open after the death of its
// parent.
// Unit: sockets
// Below: up to and including the value, the child closes all sockets.
// Above: the child keeps the other sockets.
// Measure: `pytest tests/python/failures/test_deaths.py -k
// test_child_does_not_hide_a_death_on_another_node`
inline constexpr size_t kDescriptorsClosedInChildren = 4096;

// -- Links

// The round-trip time from which on a TCP link has a delay. Over such a link, as many bytes are in
// flight as the link carries, and so are several turns of an alltoall.
// Below: a fixed number of bytes, and one turn at a time, keep the link busy.
// Above: from the value on, the link would idle for a round trip after these bytes.
// Measure: `python -m benchmarks.box.distant`, and `python -m benchmarks.collectives.nodes
// --layout 2x2 --rate 1gbit --delay 10 --collective all_to_all`
inline constexpr std::chrono::microseconds kDistantRoundTrip{500};

}  // namespace hbm
