// Thresholds of the box's server: the limits of one client, and the times and batches of its
// listeners.
// Measure: `smb_session_test`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "box/protocol/tuning.h"

namespace hbm::box::server {

// -- Options

// The shortest lease that a box takes as an option.
// Below: the box refuses the option with Error(kInvalid).
// Above: from the value on, it takes the option, up to kLongestLease.
// Measure: `smb_server_test --gtest_filter=ServerTest.InvalidOptionsAreRefused`
inline constexpr std::chrono::milliseconds kShortestLease{100};

// The longest lease that a box takes as an option: a week.
// Below: up to and including the value, the box takes the option.
// Above: the box refuses the option with Error(kInvalid).
// Measure: `smb_server_test --gtest_filter=ServerTest.InvalidOptionsAreRefused`
inline constexpr std::chrono::hours kLongestLease{24 * 7};

// The most clients that a box takes as an option.
// Unit: clients
// Below: up to and including the value, the box takes the option.
// Above: the box refuses the option with Error(kInvalid).
// Measure: `smb_server_test --gtest_filter=ServerTest.InvalidOptionsAreRefused`
inline constexpr uint32_t kMostClients = 1u << 20;

// The most threads of one kind that a box takes as an option.
// Unit: threads
// Below: up to and including the value, the box takes the option.
// Above: the box refuses the option with Error(kInvalid).
// Measure: `smb_server_test --gtest_filter=ServerTest.InvalidOptionsAreRefused`
inline constexpr uint32_t kMostThreadsOfAKind = 256;

// The handler threads, and the threads of a large accumulate, if the options give no number.
// Unit: threads
// Below: the box has as many as the machine has processors, at least 2.
// Above: the box has the value.
// Measure: `python -m benchmarks.box --sections accumulate`
inline constexpr uint32_t kMostHandlersByDefault = 8;

// The threads of the sockets' event loops, if the options give no number.
// Unit: threads
// Below: the box has as many as the machine has processors, at least 2.
// Above: the box has the value.
// Measure: `python -m benchmarks.box --sections tcp`
inline constexpr uint32_t kMostReceiversByDefault = 4;

// -- Accumulates

// The size of an accumulate's target from which several threads share the accumulate. One thread
// and several take equally long at 768 KiB.
// Unit: bytes
// Below: the handler thread executes the accumulate, and is done before another thread would wake.
// Above: from the value on, the accumulate threads share it.
// Measure: `python -m benchmarks.box --sections accumulate`
inline constexpr uint64_t kSharedAccumulateBytes = 1 << 20;

// The number of parts of a shared accumulate, for each thread that shares it. A part is a sequence
// of steps; each step is executed on one chunk. An accumulate has no more parts than its record has
// room for (RecordSizes::parts).
// Unit: parts
// Below: a smaller value makes all threads wait for one that the scheduler holds up.
// Above: a larger value takes more time to hand the parts out.
// Measure: `python -m benchmarks.box --sections accumulate`
inline constexpr uint32_t kAccumulateRunsPerThread = 2;

// -- One client

// Attachments of one session.
// Unit: attachments
// Below: the client attaches.
// Above: at the value, the request is refused with kExhausted.
inline constexpr size_t kMostAttachmentsPerSession = 1u << 20;

// Requests of one session that wait for a handler. A stream listener stops reading from a session's
// connections long before this limit.
// Unit: requests
// Below: the request waits.
// Above: at the value, the request is refused with kExhausted.
// Measure: `smb_session_test --gtest_filter=Session.TooManyRequestsAreRefused`
inline constexpr size_t kMostRequestsPerSession = 1u << 14;

// Requests of one connection without a reply.
// Unit: requests
// Below: the listener reads from the connection.
// Above: from the value on, the listener reads again only when a handler has replied.
// Measure: `smb_stream_listener_load_test
// --gtest_filter=StreamListener.StopsReadingUntilRepliesAreTaken`
inline constexpr uint32_t kMostUnansweredPerConnection = 2 * protocol::kSequencedInFlight;

// A limit for two quantities of a connection: the bytes moved in one turn of its event loop, and
// the bytes of replies that wait.
// Unit: bytes
// Below: the listener continues to read from the connection.
// Above: if the bytes moved reach the value, the event loop serves the other connections first. If
// the bytes waiting reach the value, the listener stops reading until the client has taken replies.
// Measure: `smb_stream_listener_load_test --gtest_filter=StreamListener.StarvesNoClient`
inline constexpr uint64_t kTurnBytes = uint64_t{1} << 20;

// -- New clients

// The time from a client's connection to its join.
// Below: the connection stays open.
// Above: the listener closes it.
// Measure: `smb_stream_listener_refusal_test
// --gtest_filter=StreamListener.ClosesConnectionsThatDoNotJoinInTime`
inline constexpr std::chrono::milliseconds kJoinTimeout{5000};

// Connections that have not joined.
// Unit: connections
// Below: up to and including the value, all of them stay open.
// Above: the oldest of them is closed.
// Measure: `smb_stream_listener_refusal_test
// --gtest_filter=StreamListener.BoundsConnectionsThatHaveNotJoined`
inline constexpr size_t kMostJoining = 512;

// Connections that a listener accepts in one turn of its event loop.
// Unit: connections
// Below: the listener accepts the next one.
// Above: at the value, the event loop serves its other connections first.
// Measure: `smb_stream_listener_load_test
// --gtest_filter=StreamListener.ServesOthersWhileThousandsAreSilent`
inline constexpr int kAcceptsPerTurn = 64;

// The pause before a listener accepts again, after its process has run out of descriptors.
// Below: a smaller value makes more attempts that fail.
// Above: a larger value delays clients when descriptors are free again.
// Measure: `smb_stream_listener_load_test
// --gtest_filter=StreamListener.ContinuesWhenDescriptorsRunOut`
inline constexpr std::chrono::milliseconds kAcceptPause{50};

// The time between two warnings that a listener has run out of descriptors.
// Below: the warning is counted only.
// Above: the next warning is logged, with the count.
// Measure: `smb_stream_listener_load_test
// --gtest_filter=StreamListener.ContinuesWhenDescriptorsRunOut`
inline constexpr std::chrono::seconds kShortageWarningPeriod{60};

// Warnings of refused clients and malformed frames in each kRefusalWarningPeriod.
// Unit: warnings
// Below: the warning is logged.
// Above: at the value, the warning is counted only.
// Measure: `smb_stream_listener_refusal_test`
inline constexpr uint64_t kMostRefusalWarnings = 10;

// The period for which kMostRefusalWarnings limits the warnings.
// Below: further warnings belong to the same period.
// Above: the next warning begins another period, and states how many warnings of the last period
// were not logged.
// Measure: `smb_stream_listener_refusal_test`
inline constexpr std::chrono::seconds kRefusalWarningPeriod{10};

// Events that an event loop takes from the kernel at a time.
// Unit: events
// Below: a smaller value takes more system calls.
// Above: a larger value delays connections that the last turn did not finish.
// Measure: `smb_stream_listener_load_test --gtest_filter=StreamListener.StarvesNoClient`
inline constexpr size_t kEventsPerTurn = 64;

// The period at which the listener checks for connections whose session has ended.
// Below: a smaller value checks all connections more often.
// Above: a larger value leaves them open longer.
// Measure: `smb_stream_listener_test --gtest_filter=*ClosesTheConnectionsOfEndedSessions*`
inline constexpr std::chrono::seconds kEndedSessionPollPeriod{1};

// -- The end

// The time that close() gives to requests in flight.
// Below: close() waits for their replies.
// Above: close() ends the connections.
// Measure: `smb_server_test --gtest_filter=ServerTest.StopsWithoutWaitingForALease`
inline constexpr std::chrono::seconds kCloseDrainTimeout{2};

// The period at which drain() checks whether all connections are idle.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the box's end.
// Measure: `smb_stream_listener_test --gtest_filter=StreamListener.DrainsRequestsThatWereRead`
inline constexpr std::chrono::milliseconds kDrainPollPeriod{1};

}  // namespace hbm::box::server
