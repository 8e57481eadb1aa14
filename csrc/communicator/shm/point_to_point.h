// send and recv within a node.
//
// A small message travels in its envelope, and its send is done when that is posted. A large one
// that lies in the sender's segment is copied from there by the receiver; any other goes through
// some chunks of a block that the sender takes for it. Then the send is done when the receiver has
// all of it.
//
// A large send that is abandoned before a receive has taken its message was never made. Afterwards
// the receive fails, or, if it reads the sender's tensor, goes on: the send is peers_may_write()
// then. A receive that is abandoned after it took its message makes the send fail, Error(kPeer).
#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/message_matcher.h"

namespace hbm::shm {

inline constexpr int kTags = 1 << 30;

// Ranks are indices of members. REQUIRES (both): 0 <= tag < kTags; the peer is another member.
OperationPtr make_send(std::shared_ptr<MessageMatcher> matcher, Source in, Dtype dtype, size_t to,
                       int tag);

// `from`: nothing for any member. `*source` is set to the sender's rank in the group once the
// operation is done.
OperationPtr make_receive(std::shared_ptr<MessageMatcher> matcher, Sink out, Dtype dtype,
                          std::optional<size_t> from, int tag, std::shared_ptr<int> source);

}  // namespace hbm::shm
