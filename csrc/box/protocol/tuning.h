// Thresholds of the box's protocol: limits that both ends enforce, buffers of a connection, and the
// signs of a dead peer.
// Measure: `python -m benchmarks.box --sections tcp`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::box::protocol {

// -- Limits on the wire: another value needs another kVersion.

// The payload of one frame.
// Unit: bytes
// Below: up to and including the value, the frame is valid.
// Above: the frame is malformed; larger reads and writes go in slices.
// Measure: `smb_frame_stream_test --gtest_filter=*RefuseMalformedHeaders*`
inline constexpr uint32_t kMaxPayload = 1u << 20;

// The text of a refusal that the box sends.
// Unit: bytes
// Below: up to and including the value, all of it is sent.
// Above: the sender cuts it after the last whole character; a client refuses a longer one.
// Measure: `smb_stream_listener_refusal_test --gtest_filter=*SendsTheFirst64KiBOfACause*`
inline constexpr uint32_t kMaxCause = 64u << 10;

// Sequenced requests of one client that are in flight. The box caches this number of replies.
// Unit: requests
// Below: the client posts the next one.
// Above: from the value on, the client waits for a reply before it posts the next one. The box
// refuses a client that posts more.
// Measure: `smb_session_test
// --gtest_filter=Session.CachesAsManyRepliesAsAClientMayLeaveUnconfirmed`
inline constexpr uint32_t kSequencedInFlight = 64;

// The content of one authenticated record, or the bytes copied at a time from payloads in shared
// memory. This amount stays in the cache of a core.
// Unit: bytes
// Below: one record or copy takes all queued frames.
// Above: the frames take several records or copies; the receiver refuses a longer record.
// Measure: `smb_authenticator_test --gtest_filter=*ChecksALongPayloadRecordByRecord*`
inline constexpr uint32_t kMostRecordBytes = 256u << 10;

// -- Buffers of a connection

// The receive buffer of a connection whose payloads are in private memory.
// Unit: bytes
// Below: one system call receives all frames that have arrived.
// Above: further frames take further calls.
// Measure: `smb_frame_stream_test --gtest_filter=*TakeManyShortFramesInFewCalls*`
inline constexpr uint64_t kReceiveBufferBytes = uint64_t{64} << 10;

// The receive buffer of a connection whose payloads go to shared memory: all their bytes pass
// through it. A buffer of this size stays in the cache of a core.
// Unit: bytes
// Below: one system call receives the rest of the payload.
// Above: the payload takes several calls, and as many copies.
inline constexpr uint64_t kSharedReceiveBufferBytes = uint64_t{128} << 10;

// A limit for two quantities: the bytes of a payload, and the bytes that one system call receives
// while a payload is incomplete.
// Unit: bytes
// Below: during and after a short payload, a call fills the whole receive buffer, perhaps with
// several frames. A call that receives few bytes, and fewer than it asks for, is the last call
// before the next poll.
// Above: during and after a long payload, a call takes at most one header and body into the buffer.
// So the next payload goes straight to its destination. A call that receives many bytes is followed
// by another one without a poll, because the rest of the payload is about to arrive.
inline constexpr uint64_t kBulkBytes = uint64_t{16} << 10;

// Parts of frames that one system call sends.
// Unit: parts
// Below: all queued frames go out in one call.
// Above: the rest takes further calls.
// Measure: `smb_frame_stream_test --gtest_filter=*TakeManyShortFramesInFewCalls*`
inline constexpr size_t kPartsPerSend = 64;

// -- A dead peer

// The silence of a connection after which the kernel asks the peer for a sign of life (keepalive).
// Below: nothing is sent on an idle connection.
// Above: the kernel sends the first probe.
// Measure: `pytest tests/python/box/test_smb_reconnect.py`
inline constexpr std::chrono::seconds kKeepaliveIdle{15};

// The time between two keepalive probes of an idle connection.
// Below: the kernel waits for the reply.
// Above: the kernel sends the next probe.
// Measure: `pytest tests/python/box/test_smb_reconnect.py`
inline constexpr std::chrono::seconds kKeepaliveProbePeriod{5};

// Keepalive probes in a row without a reply from the peer.
// Unit: probes
// Below: the connection stays open.
// Above: from the value on, the kernel ends the connection: 30 s after the peer lost its power.
// Measure: `pytest tests/python/box/test_smb_reconnect.py`
inline constexpr int kKeepaliveProbes = 3;

// The age of sent data without an acknowledgement.
// Below: the kernel sends the data again.
// Above: the kernel ends the connection.
// Measure: `pytest tests/python/box/test_smb_reconnect.py`
inline constexpr std::chrono::milliseconds kUnacknowledgedTimeout{30'000};

// The pause before another attempt to connect to a Unix socket whose queue of clients is full. The
// kernel does not report when the queue has room again.
// Below: a smaller value burdens the box with attempts.
// Above: a larger value delays many clients that come together.
// Measure: `smb_stream_listener_load_test
// --gtest_filter=StreamListener.ServesOthersWhileThousandsAreSilent`
inline constexpr std::chrono::milliseconds kFullBacklogPause{2};

// -- Copies of elements

// How far ahead of its non-temporal stores a copy prefetches the source.
// Unit: bytes
// Below: a smaller value makes the copy wait for memory.
// Above: a larger value fetches lines that leave the cache before their use.
// Measure: `hbmcomm bench box --sections shm`
inline constexpr uint64_t kElementPrefetchBytes = 1024;

}  // namespace hbm::box::protocol
