// The error of a rank that received more than fits: the message's header, which has the sender's
// operation, is lost.
#pragma once

#include "base/error.h"

namespace hbm {

// The text lacks the sender's operation. The sender may report it (Peers::explain).
struct OversizedMessage : Error {
  using Error::Error;
};

}  // namespace hbm
