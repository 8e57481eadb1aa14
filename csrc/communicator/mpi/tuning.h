// Thresholds of communication over MPI: messages, algorithms, and the start of MPI.
// Measure: `python -m benchmarks.collectives --contenders hbm-c-mpi`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::communicator::mpi {

// -- Messages

// The longest payload of a message that MPI sends immediately, by its eager protocol, whether or
// not the receiver is ready. MPICH's own limit is near 8,000 bytes and depends on the network.
// Unit: bytes
// Below: up to and including the value, an operation of one such message to each peer needs no
// progress thread after it has begun.
// Above: a thread has to drive the operation to its end.
inline constexpr size_t kEagerBytes = 4096;

// The most bytes of a tensor in the first message of a send. This message also has the header.
// Unit: bytes
// Below: up to and including the value, the send is one message.
// Above: the rest follows in chunks.
// Measure: `python -m benchmarks.collectives --collectives sendrecv --contenders hbm-c-mpi`
inline constexpr size_t kFirstMessageBytes = kEagerBytes;

// The number of rounds, blocks or chunks of an operation that are in flight on a link without a
// delay. The operation stages one while the link carries the other.
// Unit: rounds
// Below: the operation posts the next one.
// Above: from the value on, the next one waits until an earlier one is done, unless the link has a
// delay. A larger value only fills the link's queue, which then drops packets. A connection whose
// last packets were dropped waits for 200 ms before it sends them again.
// Measure: `python -m benchmarks.collectives.nodes --layout 3x1 --rate 200mbit --mib 4`
inline constexpr size_t kLeastInFlight = 2;

// The rate up to which an operation fills a link with a delay: 10 Gbit/s. The bytes in flight are
// the round-trip time multiplied by this rate, up to kMostOperationBytes.
// Unit: bytes per second
// Below: on a link that is faster than the value, the rate of the operation is lower than the
// link's.
// Above: on a slower link a larger value takes memory, and fills the link's queue.
// Measure: `python -m benchmarks.collectives.nodes --layout 2x1 --rate 1gbit --delay 10`
inline constexpr double kDistantBytesPerSecond = 1.25e9;

// The period after which a rank reads the round-trip time of its connections again.
// Below: a smaller value takes more system calls.
// Above: with a larger value, the bytes in flight follow a changed link later.
// Measure: `arrivals_test --gtest_filter=Arrivals.ReadsTheRoundTripTime`
inline constexpr std::chrono::milliseconds kRoundTripPeriod{1000};

// The least chunk of messages.
// Unit: bytes
// Below: the group is refused, because its staging_bytes are too few for its ranks.
// Above: from the value on, the group uses the largest chunk that staging_bytes and
// kMostOperationBytes leave room for.
// Measure: `pytest tests/python/collectives/test_bad_input.py`
inline constexpr size_t kSmallestChunkBytes = 4 << 10;

// The largest chunk of messages.
// Unit: bytes
// Below: a smaller value costs more messages.
// Above: a larger value takes more staging memory.
inline constexpr size_t kLargestChunkBytes = 512 << 10;

// The most staging memory of one operation.
// Unit: bytes
// Below: the group uses the largest chunk with which an operation takes at most this value. On a
// link with a delay, an operation has as many rounds in flight as the value has room for.
// Above: a chunk with which an operation would take more is halved, down to kSmallestChunkBytes.
// Measure: `python -m benchmarks.scaling`
inline constexpr uint64_t kMostOperationBytes = 16 << 20;

// The most requests that one MPI_Testsome tests.
// Unit: requests
// Below: up to and including the value, one call tests all requests of a round.
// Above: the round takes several calls, each for at most this many requests.
// Measure: `python -m benchmarks.scaling`
inline constexpr size_t kRequestsPerTest = 32;

// The number of tag ranges of an MPI communicator. Operations of one communicator that are in
// flight together must use different ranges. In a range, messages follow one another in the order
// of the range's operations.
// Unit: tag ranges
// Below: a smaller value leaves a link with a delay idle, if its operations are short.
// Above: a larger value takes more memory in each group.
// Measure: `python -m benchmarks.collectives.nodes --layout 2x1 --rate 1gbit --delay 10`
inline constexpr int kTagRanges = 64;

// -- Algorithms

// The longest tensor that the root of a broadcast sends to each rank itself, if there are two or
// more other ranks. For a longer tensor, the root's link would take too long to carry the whole
// tensor to each rank.
// Unit: bytes
// Below: up to and including the value, the root sends the tensor to each rank.
// Above: the root deals shards out, and each rank passes its shard on.
// Measure: `python -m benchmarks.collectives --collectives broadcast --contenders hbm-c-mpi`
inline constexpr size_t kDirectBroadcastBytes = 64 * 1024;

// The most bytes that a rank sends to each peer in a reduction of one round.
// Unit: bytes
// Below: up to and including the value, each rank sends its whole tensor in one round.
// Above: shards go in two phases, unless kOneShotTotalBytes allows one round.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-mpi`
inline constexpr size_t kOneShotBytesPerPeer = 4096;

// The most bytes that a rank sends to all peers together in a reduction of one round.
// Unit: bytes
// Below: up to and including the value, each rank sends its whole tensor in one round.
// Above: shards go in two phases, unless kOneShotBytesPerPeer allows one round.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-mpi`
inline constexpr size_t kOneShotTotalBytes = 64 * 1024;

// -- Waits

// The period in which a waiting rank checks whether UCX has a TCP connection.
// Below: a smaller value takes more system calls.
// Above: with a larger value, a rank polls for longer before its first sleep from which a message
// can wake it.
// Measure: `arrivals_test --gtest_filter=Arrivals.WakeOnceThereIsAConnection`
inline constexpr std::chrono::milliseconds kConnectionCheckPeriod{100};

// -- The start of MPI

// The bytes in /dev/shm that MPI takes for each rank. MPICH 5.0 takes 1,061,440.
// Unit: bytes
// Below: with less room left for each rank, the group is refused, because MPI would end the ranks
// by SIGBUS.
// Above: from the value on, MPI starts.
// Measure: `mpi_connect_test --gtest_filter=Preconditions.ShmFoldersAreCountedAndHaveRoom`
inline constexpr uint64_t kShmBytesPerRank = 1'088'000;

// The files in /dev/shm that MPI makes for each rank: one of MPICH, and two of UCX.
// Unit: files
// Below: with room for fewer files for each rank, the group is refused.
// Above: from the value on, MPI starts.
// Measure: `mpi_connect_test --gtest_filter=Preconditions.ShmFoldersAreCountedAndHaveRoom`
inline constexpr uint64_t kShmFilesPerRank = 3;

// The descriptors that MPI opens in a world of any size. MPICH 5.0.2 opens 20 in a world of one.
// Unit: descriptors
// Below: the group is refused if the process can open fewer descriptors than this value plus
// kDescriptorsPerRank for each rank.
// Above: from the value on, MPI starts.
// Measure: `mpi_connect_test --gtest_filter=Preconditions.DescriptorsAreCounted`
inline constexpr size_t kDescriptorsOfWorld = 24;

// The descriptors that MPI opens for each rank. MPICH 5.0.2 opens up to 2 for each other rank.
// Unit: descriptors
// Below: the group is refused if the process can open fewer descriptors than kDescriptorsOfWorld
// plus this value for each rank.
// Above: from the value on, MPI starts.
// Measure: `mpi_connect_test --gtest_filter=Preconditions.DescriptorsAreCounted`
inline constexpr size_t kDescriptorsPerRank = 4;

// The longest trial of MPI_Init in a process of its own. MPI_Init takes a second on a busy machine.
// Below: the rank waits for the trial, unless the group's deadline passes.
// Above: from the value on, the group is refused.
// Measure: `mpi_start_test --gtest_filter=Trial.EndsAtTheDeadline`
inline constexpr std::chrono::seconds kTrialTimeout{60};

// The period in which a rank checks the trial for its end and for Ctrl-C.
// Below: a smaller value takes processor time from the trial.
// Above: a larger value delays the group, or the error after Ctrl-C.
// Measure: `mpi_start_test --gtest_filter=Trial.ReturnsAfterMpiInit`
inline constexpr std::chrono::milliseconds kTrialCheckPeriod{10};

// The longest wait until a trial that has failed is stopped. Its segments are unlinked then.
// Below: the rank waits.
// Above: from the value on, the rank kills the trial, which may leave a segment in /dev/shm.
// Measure: `mpi_start_test --gtest_filter=Trial.LeavesNoSegment`
inline constexpr std::chrono::seconds kTrialStopTimeout{5};

// The period in which a rank checks whether a trial is stopped.
// Below: a smaller value takes processor time from the trial.
// Above: a larger value delays the error.
// Measure: `mpi_start_test --gtest_filter=Trial.LeavesNoSegment`
inline constexpr std::chrono::milliseconds kTrialStopCheckPeriod{1};

// The bytes of the trial's output that an error quotes.
// Unit: bytes
// Below: up to and including the value, the error quotes all of the output.
// Above: the error quotes the last lines, as many as fit.
// Measure: `mpi_start_test --gtest_filter=Trial.ReportsHowTheProgramEnded`
inline constexpr size_t kQuotedOutputBytes = 600;

// -- The end of the process

// The longest time that the end of the process waits for threads that are in MPI_Init. Such a
// thread may wait for a peer that never comes.
// Below: the process waits, so that it can unlink all of MPI's segments.
// Above: from the value on, the process unlinks the segments that it has mapped, and ends.
// Measure: `pytest tests/python/failures/test_left_behind.py -k test_killed_ranks_leave_nothing`
inline constexpr std::chrono::seconds kInitialisationEndTimeout{1};

// The period in which the end of the process checks whether threads are still in MPI_Init.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the end of the process.
// Measure: `pytest tests/python/failures/test_left_behind.py -k test_killed_ranks_leave_nothing`
inline constexpr std::chrono::milliseconds kInitialisationEndCheckPeriod{1};

}  // namespace hbm::communicator::mpi
