// Thresholds of the process group: tensors in segments and on devices, options, and its connections
// to the store.
// Measure: `pytest tests/python/collectives/test_bad_input.py`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::process_group {

// -- Tensors

// The least tensor that PyTorch's CPU allocator places in a segment (HBMCOMM_ALLOCATOR=segment).
// Unit: bytes
// Below: the tensor is in memory of PyTorch's previous allocator.
// Above: from the value on, the tensor is in the segment, where other ranks read it without a copy.
// Measure: `python -m benchmarks.collectives --collectives allreduce`
inline constexpr size_t kSegmentTensorBytes = size_t{64} << 10;

// The least host copy of a device tensor that is placed in the segment, in pinned memory.
// Unit: bytes
// Below: the host copy is in PyTorch's memory, because the ranks copy few bytes, and a block of the
// segment would take whole pages.
// Above: from the value on, other ranks read the host copy without copying it.
// Measure: `python -m benchmarks.gpu`
inline constexpr size_t kPinnedHostCopyBytes = size_t{64} << 10;

// The chunk of a collective on device tensors, unless HBMCOMM_DEVICE_CHUNK_BYTES names another. The
// copy of a chunk takes 0.16 ms on PCIe 4.0 x16 (25 GB/s). It costs another 10 to 20 us to queue a
// copy, to see its event and to wait for the other ranks. The pipeline takes the time of one chunk
// to fill, and of one chunk to drain.
// Unit: bytes
// Below: under two chunks, the collective is not cut.
// Above: the collective is cut: the copies of a chunk overlap with the reduction of the next.
// Measure: `python -m benchmarks.gpu`
inline constexpr size_t kDeviceChunkBytes = size_t{4} << 20;

// The least chunk that HBMCOMM_DEVICE_CHUNK_BYTES may name.
// Unit: bytes
// Below: operations on device tensors are refused.
// Above: from the value on, the group uses the chunk.
// Measure: `pytest tests/python/accelerator/test_accelerator_chunks.py -k
// test_chunk_bytes_that_make_no_sense`
inline constexpr int64_t kLeastDeviceChunkBytes = 4 << 10;

// The divisor of the number of streams (EqualStreams) of a device collective; the quotient, rounded
// down, multiplies the bytes of a chunk. A chunk takes one copy for each stream, so many streams
// need large chunks.
// Unit: streams
// Below: under twice the value, a chunk has the bytes that kDeviceChunkBytes or
// HBMCOMM_DEVICE_CHUNK_BYTES sets.
// Above: from twice the value on, each multiple of the value adds these bytes to a chunk.
// Measure: `python -m benchmarks.gpu`
inline constexpr size_t kStreamsPerDeviceChunk = 8;

// -- Options

// The least staging_bytes.
// Unit: bytes
// Below: the option is refused.
// Above: from the value on, the option is taken.
// Measure: `pytest tests/python/collectives/test_bad_input.py -k test_wrong_option`
inline constexpr int64_t kLeastStagingBytes = 64 << 10;

// The most reduce_threads.
// Unit: threads
// Below: up to and including the value, the option is taken.
// Above: the option is refused.
// Measure: `pytest tests/python/collectives/test_bad_input.py -k test_wrong_option`
inline constexpr int64_t kMostReduceThreads = 64;

// The least heartbeat_timeout. It is longer than a second, because a machine is asked for a sign of
// life once a second.
// Below: the option is refused.
// Above: from the value on, the option is taken.
// Measure: `pytest tests/python/collectives/test_bad_input.py -k test_wrong_option`
inline constexpr std::chrono::milliseconds kLeastHeartbeatTimeout{3000};

// The heartbeat timeout that HBMCOMM_HEARTBEAT_TIMEOUT may not reach, because its milliseconds are
// counted in 64 bits.
// Below: the variable is taken.
// Above: from the value on, the variable is refused.
// Measure: `pytest tests/python/collectives/test_bad_input.py -k test_wrong_environment`
inline constexpr std::chrono::seconds kHeartbeatTimeoutLimit{1'000'000'000};

// The number of a group's latest operations that its flight record holds.
// Unit: operations
// Below: a smaller value loses the operation that one rank never issued.
// Above: a larger value takes more memory for each group.
// Measure: `pytest tests/python/failures/test_flight_record.py`
inline constexpr size_t kRecordedOperations = 64;

// The number of a process' latest operations that a profile holds.
// Unit: operations
// Below: a smaller value loses the beginning of a longer profile.
// Above: a larger value takes more memory while a profile is recorded or metrics are on.
// Measure: `pytest tests/python/collectives/test_profile.py`
inline constexpr size_t kProfiledOperations = 65536;

// The most totals of the metrics, each of another kind, size, path, data and late rank.
// Unit: totals
// Below: each operation is in a total.
// Above: an operation that needs another total is only counted, as left out.
// Measure: `profile_totals_test --gtest_filter=ProfileTotals.AreBounded`
inline constexpr size_t kMostTotals = 4096;

// -- The store

// The time that a group waits for its second connection to the store before it asks PyTorch's
// connection for a sign of life. It waits for the answer for the same time, and then repeats both
// waits.
// Below: the group waits for the second connection.
// Above: PyTorch's connection is asked for a sign of life; if it is gone, the wait ends.
// Measure: `pytest tests/python/failures/test_store_connection.py`
inline constexpr std::chrono::milliseconds kStoreOpenTimeout{200};

// The time from a failed try to make the second connection until the next try.
// Below: questions go through PyTorch's connection.
// Above: from the value on, the next question tries to make the second connection.
// Measure: `pytest tests/python/failures/test_store_connection.py`
inline constexpr std::chrono::milliseconds kStoreReopenDelay{10'000};

// The time that other ranks give the rank that has claimed the decision on a monitored barrier to
// publish its verdict. A rank that runs publishes the verdict immediately.
// Below: the other ranks wait for the verdict.
// Above: the error says that the deciding rank is stopped or has died.
// Measure: `pytest tests/python/failures/test_deaths_at_monitored_barrier.py`
inline constexpr std::chrono::seconds kVerdictTimeout{10};

// -- Reconfiguration

// The interval at which reconfigure() checks whether other threads have left their calls of the
// group.
// Below: the check may take processor time from these threads.
// Above: reconfigure() may return later by this time, if another thread is in a call.
// Measure: `pytest tests/python/failures/test_reconfigure.py -k test_works_in_flight_fail`
inline constexpr std::chrono::milliseconds kTurnstileCheckPeriod{1};

// The time for which a process serves the store of its handle after the group of that handle is
// formed. It serves the store for this time even if the members form the next group earlier.
// Below: a rank that is no member of the next group can read there why its group has ended.
// Above: a process that reconfigures often has more stores at the same time.
// Measure: `pytest tests/python/failures/test_reconfigure.py -k test_nothing_grows`
inline constexpr std::chrono::seconds kServedStoreTime{5};

// The pause of PyTorch's wait() in such a store after the first question. Each further pause is
// twice as long.
// Below: a smaller value asks more questions before the other ranks can have answered.
// Above: a larger value delays the groups that PyTorch makes.
// Measure: `python -m benchmarks.heal`
inline constexpr std::chrono::microseconds kFirstMemberStorePause{50};

// The longest such pause.
// Below: the pause grows.
// Above: it stays at the value.
// Measure: `python -m benchmarks.heal`
inline constexpr std::chrono::microseconds kLongestMemberStorePause{10'000};

}  // namespace hbm::process_group
