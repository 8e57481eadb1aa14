// Thresholds of the stream transports, and of the slices into which every transport cuts reads and
// writes.
// Measure: `python -m benchmarks.box --sections tcp`

#pragma once

#include <chrono>
#include <cstdint>

namespace hbm::box::transport {

// The bytes of a slice, the part of a read or write that one request of a connection moves.
// Unit: bytes
// Below: the transfer is one slice, on one connection.
// Above: the transfer is several slices, which the connections share; the last one may be shorter.
inline constexpr uint32_t kSliceBytes = 256u << 10;

// The size up to which a transfer overtakes larger ones.
// Unit: bytes
// Below: up to and including the value, the transfer is sent before larger ones. If the first
// connection moves more than the value, and another one is idle, the idle one takes the transfer.
// Above: the transfer waits its turn.
// Measure: `python -m papers.connections --quick`
inline constexpr uint64_t kOvertakingBytes = 64u << 10;

// The bytes of slices in flight on a connection whose link has no delay. On loopback 512 KiB stay
// in the caches between the socket and the copy, and moving 1 GB takes a quarter less processor
// time than with 1 MiB. Four connections keep 25 Gbit/s busy at a round trip of 0.6 ms.
// Unit: bytes
// Below: the connection takes the next slice.
// Above: from the value on, the slice goes to another connection, or waits, unless the link has a
// delay.
inline constexpr uint64_t kStreamBytesInFlight = 512u << 10;

// The bytes of slices that are in flight for a link's delay, in addition to kStreamBytesInFlight,
// on all connections of a client together. Each connection has at most an equal share.
// Unit: bytes
// Below: a smaller value leaves a fast and distant link idle.
// Above: with a larger value, other requests wait longer behind the slices. The client has at most
// client::kUnsequencedInFlight slices.
// Measure: `python -m benchmarks.box.distant`
inline constexpr uint64_t kMostStreamBytesInFlight = 16u << 20;

// The bytes of requests that wait on the first connection to be sent together.
// Unit: bytes
// Below: while other requests are in flight, new requests wait for the next progress().
// Above: from the value on, the waiting requests are sent together.
// Measure: `smb_tcp_transport_test --gtest_filter=TcpTransport.GathersShortRequests`
inline constexpr uint64_t kGatheredBytes = 64u << 10;

// The bytes that a connection receives before it asks for slices again.
// Unit: bytes
// Below: it continues to receive while there is more.
// Above: it first takes slices, up to kStreamBytesInFlight.
inline constexpr uint64_t kReceivedBytesPerTurn = kSliceBytes;

// The most connections of a client over tcp: the largest valid value of its option `lanes`.
// Unit: connections
// Below: up to and including the value, the client opens as many as the option says.
// Above: connecting fails with Error(kInvalid).
// Measure: `python -m papers.connections --quick`
inline constexpr uint32_t kMostConnections = 16;

// The longest sleep of a thread that serves a connection.
// Below: it sleeps until data arrive or the deadline passes.
// Above: it wakes and sleeps again.
// Measure: `smb_transport_test --gtest_filter=*ProgressReturnsInTime*`
inline constexpr std::chrono::hours kLongestStreamSleep{1};

}  // namespace hbm::box::transport
