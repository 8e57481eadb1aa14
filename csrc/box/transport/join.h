// Joins a box over a stream socket: Hello, Join, Joined.
//
// Threads: any; each stream is used by one at a time.
#pragma once

#include <string>

#include "box/protocol/frame_stream.h"
#include "box/protocol/protocol.h"
#include "box/protocol/socket.h"
#include "box/transport/transport.h"

namespace hbm::box::transport {

// Returns the Join for a network connection: opening.join, with kAuthenticated if there is a token
// and the option `seal` is on.
protocol::Join authenticated_join(const TransportOptions& opening);

// Joins over a new connection, with the session and flags of `request`, and proves the token in
// both directions. Rejects a box that does not prove the client's token. Authenticates the stream
// afterwards if the flag kAuthenticated is set.
//
// Throws Refused if the box refuses the join, if a required token is missing, or if the ends
// disagree on the option `seal`. Throws Error(kNetwork), naming `box`, if the box closes the
// connection, violates the protocol, misses `deadline` or fails to prove the token.
protocol::Joined join_box(protocol::FrameStream& stream, const std::string& box,
                          const protocol::Join& request, const std::string& token,
                          protocol::Deadline deadline);

}  // namespace hbm::box::transport
