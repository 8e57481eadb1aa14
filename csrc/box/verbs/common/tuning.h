// Thresholds of RDMA, for the client and the box: queues, buffers, and times of a connection.
// Measure: `python -m papers.verbs`

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace hbm::box::verbs::common {

// -- Messages

// The bytes of a message or a write that go out in the work request itself.
// Unit: bytes
// Below: up to and including the value, and at most the device's own limit, the device reads the
// bytes from the work request.
// Above: the device reads the bytes from a registered buffer.
inline constexpr uint32_t kInlineBytes = 220;

// -- The client

// The most queue pairs of a client: the largest valid value of its option `lanes` over verbs.
// Unit: queue pairs
// Below: up to and including the value, the client connects as many as the option says.
// Above: connecting fails with Error(kInvalid).
inline constexpr uint32_t kMostQueuePairs = 16;

// The bytes of slices in flight on a queue pair. The limit keeps short transfers from waiting long
// behind large ones.
// Unit: bytes
// Below: the queue pair takes the next slice.
// Above: from the value on, the slice goes to another queue pair, or waits.
inline constexpr uint64_t kQueuePairBytesInFlight = 4u << 20;

// Work requests that a queue pair has at a time.
// Unit: work requests
// Below: the queue pair takes the next one.
// Above: at the value, it waits for completions.
inline constexpr uint32_t kQueuePairDepth = 128;

// The number of work requests in a chain for which the device signals one completion. The last work
// request of a chain is always signalled.
// Unit: work requests
// Below: a smaller value makes more completions.
// Above: a larger value frees buffers later.
inline constexpr uint32_t kWorkRequestsPerSignal = 32;

// Registered buffers, of one slice each, for transfers from and to memory that is not registered.
// Unit: buffers
// Below: the transfer is copied through a free buffer.
// Above: when all of them are in use, the transfer waits for one.
inline constexpr uint32_t kSliceBuffers = 16;

// Control requests that the device of a client is sending.
// Unit: requests
// Below: the request is sent.
// Above: at the value, the request waits until the device has sent an earlier one.
inline constexpr uint32_t kMessagesInFlight = 64;

// Buffers of a client for the box's replies.
// Unit: buffers
// Below: with a smaller value the box's device waits more often for a free buffer, because each
// reply, or each part of a long reply, takes one.
// Above: a larger value takes more registered memory in each client.
inline constexpr uint32_t kReplyBuffers = 32;

// Completions that a client takes from its completion queue in one call.
// Unit: completions
// Below: a call that takes fewer has emptied the queue, and the client continues.
// Above: after a call that takes as many as the value, the client makes another call.
inline constexpr int kClientCompletionsPerPoll = 32;

// The time for which a waiting client polls its queue: the round trip of a short transfer.
// Below: the client polls.
// Above: the client sleeps until the device has a completion.
inline constexpr std::chrono::microseconds kPollTime{20};

// The time for each of these: to resolve an address, to resolve a route, and to check whether there
// is a route.
// Below: the client waits for the connection manager.
// Above: the client tries the host's next address, or fails.
inline constexpr std::chrono::milliseconds kResolveTimeout{2000};

// The most reads in flight on a queue pair. Both ends set this limit.
// Unit: reads
// Below: if the limit of a device is less, that limit applies.
// Above: further reads wait in the device.
inline constexpr int kReadsInFlight = 16;

// -- The box

// Connection requests that wait in the connection manager until the box takes them.
// Unit: requests
// Below: a further request waits.
// Above: the connection manager drops a further request.
inline constexpr int kListenBacklog = 128;

// Challenges that the box has issued, and whose clients have not connected all queue pairs.
// Unit: challenges
// Below: the box issues the next one.
// Above: at the value, it forgets the oldest one first.
// Measure: `verbs_messages_test --gtest_filter=VerbsChallenges.OldestIsDropped`
inline constexpr size_t kMostChallenges = 512;

// The time from the issue of a challenge to each connection request of the client that answers it.
// Below: the box admits the queue pair.
// Above: the box refuses the queue pair, and the client must request another challenge.
inline constexpr std::chrono::seconds kChallengeTimeout{5};

// The time from a client's first queue pair to its last.
// Below: the box waits for the other queue pairs.
// Above: the box ends the connection.
inline constexpr std::chrono::milliseconds kConnectTimeout{5000};

// The time for the last replies to a client, and for its work in flight when the box disconnects
// its queue pairs.
// Below: the box waits for the completions.
// Above: the box destroys the queue pairs.
inline constexpr std::chrono::milliseconds kFarewellTimeout{1000};

// The period at which the box checks its clients.
// Below: a smaller value wakes an idle box more often.
// Above: a larger value delays the end of clients that are gone.
inline constexpr std::chrono::milliseconds kSweepPeriod{1000};

// The period at which the box checks its clients while some are leaving, or the box is closing.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the end of these clients, and of the box.
inline constexpr std::chrono::milliseconds kLeavingSweepPeriod{10};

// The period at which drain() checks whether all requests are answered, and the listener's
// destructor whether the work in flight has ended.
// Below: a smaller value takes more processor time.
// Above: a larger value delays the end of the box.
inline constexpr std::chrono::milliseconds kDrainPollPeriod{1};

// The queue pairs that the box expects of each client. It sizes its completion queue for the most
// clients with this number of queue pairs.
// Unit: queue pairs
// Below: clients with fewer queue pairs leave room for more clients.
// Above: clients with more queue pairs leave room for fewer clients. A client without room in the
// queue is refused with kExhausted.
inline constexpr uint32_t kExpectedQueuePairs = 4;

// Messages in flight to one client that carry replies. A long reply takes several messages.
// Unit: messages
// Below: the box sends the next message.
// Above: at the value, the next message waits until an earlier one has completed.
inline constexpr uint32_t kRepliesInFlight = 8;

// Replies to one client that wait because the client does not take them.
// Unit: replies
// Below: up to and including the value, they wait.
// Above: the box ends the connection.
inline constexpr uint32_t kMostUnsentReplies = 1u << 14;

// Buffers of the box for replies that do not go inline, shared by all clients.
// Unit: buffers
// Below: the reply is sent from a free buffer.
// Above: when all of them are in use, the reply waits for one.
inline constexpr uint32_t kLongReplyBuffers = 64;

// Completions that the box takes from its completion queue in one call.
// Unit: completions
// Below: a smaller value takes more calls.
// Above: a larger value posts freed receive buffers again later.
inline constexpr int kBoxCompletionsPerPoll = 64;

// Warnings of refused clients in each kRefusalWarningPeriod.
// Unit: warnings
// Below: the warning is logged.
// Above: at the value, the warning is counted only.
inline constexpr uint64_t kMostRefusalWarnings = 20;

// The period for which kMostRefusalWarnings limits the warnings.
// Below: further warnings belong to the same period.
// Above: the next warning begins another period, and states how many warnings of the last period
// were not logged.
inline constexpr std::chrono::seconds kRefusalWarningPeriod{60};

}  // namespace hbm::box::verbs::common
