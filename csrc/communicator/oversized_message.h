// The error of a rank that received a message longer than its buffer. Such a message's header,
// which names the sender's operation, is lost.
#pragma once

#include "base/error.h"

namespace hbm::communicator {

// The text lacks the sender's operation. The sender may report it (Peers::explain).
struct OversizedMessage : Error {
  using Error::Error;
};

}  // namespace hbm::communicator
