// send and recv within a node.
//
// A message that fits into a mailbox cell is inline in its envelope; its send is done when the
// envelope is posted. The receiver copies a longer message directly from the sender's segment, if
// the tensor is there. Any other message goes through chunks in a block that the sender allocates.
// The send of a longer message is done when the receiver has all of it.
//
// If a send of a longer message is abandoned before a receive has taken the message, the message
// counts as never sent. If a receive has taken the message and reads the sender's tensor, the
// receive continues, and peers_may_write() of the send is true. If the receive takes chunks, it
// fails with Error(kPeer), except if all chunks are in the block already. A receive that is
// abandoned after it took its message makes the send fail with Error(kPeer).
#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/message_matcher.h"

namespace hbm::communicator::shm {

inline constexpr int kTags = 1 << 30;

// Returns a send. Ranks are local ranks. REQUIRES, also for make_receive(): 0 <= tag < kTags; the
// peer is another rank.
OperationPtr make_send(std::shared_ptr<MessageMatcher> matcher, Source in, Dtype dtype, size_t to,
                       int tag);

// Returns a receive. `from`: no value for any rank. Sets `*source` to the sender's rank in the
// group when the operation is done.
OperationPtr make_receive(std::shared_ptr<MessageMatcher> matcher, Sink out, Dtype dtype,
                          std::optional<size_t> from, int tag, std::shared_ptr<int> source);

}  // namespace hbm::communicator::shm
