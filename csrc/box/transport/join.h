// Joins a box over a stream socket: Hello, Join, Joined.
//
// Threads: every function may be called from any thread, each stream used by one at a time.
#pragma once

#include <string>

#include "box/protocol/frame_stream.h"
#include "box/protocol/protocol.h"
#include "box/protocol/socket.h"
#include "box/transport/transport.h"

namespace hbm::transport {

// The Join that a connection over a network begins with: `opening`'s, which asks for a seal if
// there is a token and the seal is not turned off.
smb::Join sealed_join(const TransportOptions& opening);

// Joins over a new connection, with `request`'s session and flags, and proves the token both ways.
// A client that has a token leaves a box that does not prove it. With the flag kSealed the stream
// is sealed afterwards. Throws Refused with the box's answer, or for a token that is missing;
// Error(kNetwork), which names `box`, when the other end closes, breaks the protocol, is too late
// or proves nothing.
smb::Joined join_box(smb::FrameStream& stream, const std::string& box, const smb::Join& request,
                     const std::string& token, smb::Deadline deadline);

}  // namespace hbm::transport
