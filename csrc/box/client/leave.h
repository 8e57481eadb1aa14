// How a client takes leave of a box.
#pragma once

#include <memory>
#include <string>

#include "box/transport/transport.h"

namespace hbm::client {

// Ends the link's session, with its attachments, and the link. A box that does not answer within a
// second, or cannot be reached, ends the session when its lease is over.
void leave(std::unique_ptr<transport::Transport> link, const std::string& box);

}  // namespace hbm::client
