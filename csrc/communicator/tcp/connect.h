// Makes the TCP links of a group whose ranks have met in the store.
//
// Each rank listens on all its addresses, and publishes its port, its addresses and a random
// token in the step "links". The lower rank of each pair calls the higher one:
//
//   caller:   Hello with the group's number, the caller's rank and the listener's token
//   listener: Reply with the caller's token
//   caller:   kConfirmation
//
// A listener closes callers that send anything else, and a caller tries its next address if another
// program answers. A caller that has sent its confirmation uses the connection, so a listener that
// has read the confirmation may too. Nothing is encrypted.
//
// Threads: called once for each group, by the thread that creates it.
#pragma once

#include <cstdint>
#include <memory>

#include "bootstrap/rendezvous.h"
#include "communicator/tcp/links.h"

namespace hbm::communicator::tcp {

// Connects all pairs of ranks, and closes the listener. All ranks call it. `group_number`: equal on
// all ranks. Throws Error(kDeath) naming a rank that has died. Throws Error(kTimeout) naming the
// ranks without a connection, and their addresses. Throws Error(kUnavailable) if the kernel gives
// no socket.
std::shared_ptr<Links> connect(const bootstrap::Rendezvous& rendezvous, uint64_t group_number);

}  // namespace hbm::communicator::tcp
