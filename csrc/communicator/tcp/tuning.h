// Thresholds of messages over TCP links.
// Measure: `python -m benchmarks.links`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::communicator::tcp {

// The longest message that is sent immediately. The receiver keeps it in memory until a receive
// matches it.
// Unit: bytes
// Below: up to and including the value, the message is sent immediately.
// Above: the sender first asks, and sends the message when a receive has matched it.
inline constexpr size_t kEagerBytes = 64 << 10;

// The longest message. A longer one can only come from a program that is not hbm.
// Unit: bytes
// Below: up to and including the value, the message is received.
// Above: the receiver closes the link.
// Measure: `tcp_links_test --gtest_filter=Links.MalformedFramesEndTheLink`
inline constexpr uint64_t kLongestMessageBytes = 1 << 30;

// The bytes that one read may take beyond the message that is being received. A read into this
// memory may bring several small messages.
// Unit: bytes
// Below: a smaller value takes more system calls.
// Above: a larger value takes more memory for each link, and copies more.
inline constexpr size_t kReadBytes = 16 << 10;

// The most reads of one link before the next link has its turn.
// Unit: reads
// Below: a smaller value takes more calls of epoll_wait().
// Above: a larger value lets one fast sender delay the messages of others.
inline constexpr int kReadsPerTurn = 16;

// The most messages that one call of sendmsg() sends.
// Unit: messages
// Below: a smaller value takes more system calls for small messages.
// Above: a larger value takes more memory on the stack.
inline constexpr size_t kMessagesPerWrite = 8;

// The most links whose events one call of epoll_wait() returns.
// Unit: links
// Below: a smaller value takes more system calls in a large group.
// Above: a larger value takes more memory on the stack.
inline constexpr int kEventsPerTurn = 64;

// -- Connecting

// The time that a rank tries to connect to one address of another rank.
// Below: the rank waits.
// Above: from the value on, the rank tries the next address.
// Measure: `pytest tests/python/failures/test_worlds.py`
inline constexpr std::chrono::milliseconds kAddressTimeout{2000};

// The pause of a rank that has tried all addresses of another rank, before it tries them again.
// Below: a smaller value takes processor time.
// Above: a larger value delays the group if the network came late.
// Measure: `pytest tests/python/failures/test_worlds.py`
inline constexpr std::chrono::milliseconds kRetryPause{100};

// The time that a caller has to say which rank it is. The listener's process may be busy.
// Below: the listener waits.
// Above: from the value on, the listener closes the connection.
// Measure: `tcp_links_test --gtest_filter=Connect.StrangersAreTurnedAway`
inline constexpr std::chrono::milliseconds kHelloTimeout{5000};

// The time that a rank has to answer a caller. It may be busy or stopped.
// Below: the caller waits.
// Above: from the value on, the caller tries the next address.
// Measure: `tcp_links_test --gtest_filter=Connect.EachRankReachesEachOther`
inline constexpr std::chrono::milliseconds kReplyTimeout{30'000};

// The most callers beyond the expected ranks that have not said which rank they are.
// Unit: callers
// Below: the listener accepts the next caller.
// Above: from the value on, the next caller waits in the kernel's queue.
// Measure: `tcp_links_test --gtest_filter=Connect.StrangersAreTurnedAway`
inline constexpr size_t kMostStrangers = 64;

// The period in which a rank that waits for connections checks whether another rank has died or has
// ended the formation.
// Below: a smaller value takes processor time.
// Above: a larger value delays the error.
// Measure: `pytest tests/python/failures/test_worlds.py -k
// test_a_rank_that_dies_before_it_connects_is_named`
inline constexpr std::chrono::milliseconds kConnectCheckPeriod{20};

}  // namespace hbm::communicator::tcp
