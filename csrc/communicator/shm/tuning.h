// Thresholds of communication within a node: waits, slots, zero-copy transfers, messages.
// Measure: `python -m benchmarks.collectives --contenders hbm-c-zero-copy,hbm-c-staged`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::communicator::shm {

// -- Waits

// The time for which a waiting rank polls without yielding. Ranks that outnumber the processors
// yield from the beginning of a wait.
// Below: the rank polls, and keeps its processor.
// Above: from the value on, the rank yields its processor between polls.
// Measure: `python -m benchmarks.collectives --collectives allreduce --sizes 8`
inline constexpr std::chrono::microseconds kSpinTime{20};

// The time, from the beginning of a wait, for which the waiting rank polls and yields.
// Below: the rank polls, and yields its processor once kSpinTime has passed.
// Above: from the value on, the rank sleeps until another rank wakes it.
// Measure: `shm_failure_test --gtest_filter=*NodeSleep.CostsLittleAndEndsPromptly*`
inline constexpr std::chrono::microseconds kYieldTime{100};

// kYieldTime of ranks that outnumber the processors: each yield lets another rank of the node run.
// Below: the rank yields its processor and polls again.
// Above: from the value on, the rank sleeps until another rank wakes it.
// Measure: `hbmcomm bench collectives --ranks 8 --contenders hbm-staged`
inline constexpr std::chrono::microseconds kOversubscribedYieldTime{500};

// The polls between two readings of the clock, while a rank polls without yielding.
// Unit: polls
// Below: a smaller value reads the clock more often than a peer's data can arrive.
// Above: a larger value lets the rank poll for longer than kSpinTime.
// Measure: `python -m benchmarks.collectives --collectives allreduce --sizes 8`
inline constexpr int kPollsPerClockReading = 32;

// The time after which a waiting rank first checks whether the ranks that it waits for live. The
// pause before each further check of the wait is twice as long, up to kPeerCheckPeriod.
// Below: a smaller value makes more system calls in each wait.
// Above: a larger value delays the error after a death.
// Measure: `python -m benchmarks.heal --layouts aa`
inline constexpr std::chrono::milliseconds kFirstPeerCheck{1};

// The longest pause between two such checks of a wait.
// Below: a smaller value makes more system calls.
// Above: a larger value delays the error after a death.
// Measure: `shm_failure_test --gtest_filter=NodeDeath.EndsTransfersThatWaitForIt`
inline constexpr std::chrono::milliseconds kPeerCheckPeriod{10};

// The time in which a rank that has begun to write the failure report must finish it.
// Below: the other ranks wait for the text of the report.
// Above: from the value on, the writer counts as dead, and each rank raises its own error.
// Measure: `shm_failure_test --gtest_filter=NodeDeath.IsReportedToAllWaitersPromptly`
inline constexpr std::chrono::milliseconds kReportWriteTimeout{50};

// -- Slots and segments

// The room for transfers in a slot. A slot has room for at least two chunks of a reduction and at
// most four, whatever this value is. Trials had two ranks, 1 MiB of L2 and 32 MiB of L3. An
// alltoall of 2 MiB took 6 % less time with this value than with 128 KiB. An allgather of 2 MiB
// took as long with 1 MiB as with this value.
// Unit: bytes
// Below: a smaller value takes more phases for a large transfer.
// Above: a larger value takes more memory, and the slots no longer fit the processor's cache.
// Measure: `python -m benchmarks.collectives --collectives alltoall --contenders hbm-c-staged`
inline constexpr size_t kSlotTransferBytes = size_t{512} << 10;

// A transfer of at least this many bytes is zero-copy, if its tensor is in the owner's segment: the
// other ranks read the tensor there. This costs one more phase.
// Unit: bytes
// Below: the transfer is copied to a slot.
// Above: from the value on, the other ranks read the transfer in the segment.
// Measure: `shm_collectives_test`
inline constexpr size_t kZeroCopyBytes = 16 * 1024;

// An allreduce or a reduce of at least this many bytes is zero-copy, if the tensors of all ranks
// are in place in their segments. Each rank then moves a share of the tensors instead of all of
// them. This costs one more phase. An allreduce of 8 KiB took 0.5 us instead of 1.3 us with 2 ranks
// on processors near each other. On distant ones it took 1.0 us instead of 4.6 us.
// Unit: bytes
// Below: the tensors are copied to slots.
// Above: from the value on, each rank reduces a share in the segments.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-zero-copy`
inline constexpr size_t kZeroCopyReductionBytes = 4 * 1024;

// The most bytes that one poll of an operation copies. In a reduce_scatter: the most bytes of each
// source that one poll reduces.
// Unit: bytes
// Below: up to and including the value, one poll takes all of the data.
// Above: the rest follows in further polls, with a check for timeouts and aborts in between.
// Measure: `shm_failure_test --gtest_filter=NodeFailure.ALongTransferIsMovedInSlices`
inline constexpr size_t kBytesPerPoll = size_t{16} << 20;

// The bytes that one poll of a zero-copy reduction reduces, for each thread.
// Unit: bytes
// Below: up to and including the value, one poll reduces all of the rank's share.
// Above: the rest follows in further polls, with a check for timeouts and aborts in between.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-zero-copy`
inline constexpr size_t kReducedBytesPerPoll = size_t{4} << 20;

// If a rank's transfer to itself has at least this many bytes, the rank copies the transfer while
// it waits for the other ranks.
// Unit: bytes
// Below: the transfer is copied when the operation begins.
// Above: from the value on, the transfer is copied in slices of kOwnCopySliceBytes between polls,
// and the rest at the end.
// Measure: `shm_collectives_test
// --gtest_filter=PeerTransfers.CopyWhatIsForTheRankItselfWhileItWaits`
inline constexpr size_t kOverlappedOwnCopyBytes = size_t{1} << 20;

// The slice of its transfer to itself that a rank copies between two polls.
// Unit: bytes
// Below: a smaller value polls more often.
// Above: a larger value notices the other ranks' data later.
// Measure: `python -m benchmarks.collectives --collectives gather --contenders hbm-c-staged`
inline constexpr size_t kOwnCopySliceBytes = size_t{64} << 10;

// -- Reductions

// On a node with at most this many ranks, each rank reduces whole chunks, in the processor's cache.
// Unit: ranks
// Below: up to and including the value, each rank reduces all of each chunk, and a tensor of one
// chunk takes one phase.
// Above: each rank reduces a share of each chunk, and kOneShotTotalBytes bounds tensors of one
// phase.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-staged`
inline constexpr size_t kWholeChunkRanks = 3;

// More than kWholeChunkRanks ranks reduce a tensor in one phase if the tensors of all these ranks
// together have at most this many bytes. If two chunks of a reduction have fewer bytes than this
// value, the limit is two chunks.
// Unit: bytes
// Below: up to and including the value, each rank reduces all of the tensor in one phase.
// Above: each rank reduces a share of each chunk.
// Measure: `python -m benchmarks.collectives --collectives allreduce --contenders hbm-c-staged`
inline constexpr size_t kOneShotTotalBytes = 256 << 10;

// -- Messages

// The most chunks of a staged message that are in flight.
// Unit: chunks
// Below: the sender writes the next chunk.
// Above: from the value on, the sender waits until the receiver has copied a chunk.
// Measure: `shm_transfer_test --gtest_filter=NodeTransfers.ArriveInSlicesAndExposeTheTensor`
inline constexpr size_t kStagedChunksInFlight = 8;

// A message of at least this many bytes is staged in long chunks. A shorter message has short
// chunks, so that its receiver waits less for the first chunk.
// Unit: bytes
// Below: the message is staged in chunks of kShortStagedChunkBytes.
// Above: from the value on, the message is staged in chunks of kLongStagedChunkBytes.
// Measure: `shm_transfer_test --gtest_filter=NodeTransfers.UseLargerChunksIfLong`
inline constexpr size_t kLongStagedMessageBytes = size_t{512} << 10;

// The chunk of a staged message of less than kLongStagedMessageBytes.
// Unit: bytes
// Below: a smaller value wakes the two ranks more often.
// Above: a larger value lets the receiver wait longer for the first chunk.
// Measure: `python -m benchmarks.collectives --collectives sendrecv --contenders hbm-c-staged`
inline constexpr size_t kShortStagedChunkBytes = size_t{32} << 10;

// The chunk of a staged message of at least kLongStagedMessageBytes.
// Unit: bytes
// Below: a smaller value wakes the two ranks more often.
// Above: with a larger value the chunks no longer fit the processor's cache.
// Measure: `python -m benchmarks.collectives --collectives sendrecv --contenders hbm-c-staged`
inline constexpr size_t kLongStagedChunkBytes = size_t{64} << 10;

// -- The meeting of the ranks

// The pause of a rank before it sends its descriptors again, after the kernel had no room for more
// descriptors in flight.
// Below: a smaller value takes processor time from the ranks that have to receive descriptors.
// Above: a larger value delays the group.
// Measure: `local_peers_test --gtest_filter=Explore.FewDescriptorsInFlightAreEnough`
inline constexpr std::chrono::milliseconds kDescriptorRetryPause{1};

// The longest wait for descriptors before a rank checks whether the other ranks live.
// Below: a smaller value makes more system calls.
// Above: a larger value delays the error after a death.
// Measure: `local_peers_test --gtest_filter=Explore.NamesARankKilledInProgress`
inline constexpr std::chrono::milliseconds kMeetingCheckPeriod{20};

}  // namespace hbm::communicator::shm
