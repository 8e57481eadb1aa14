// The order of a client's operations: which ones wait for which.
//
// Two operations conflict when they touch the same bytes of a segment and one of them changes
// these. The later one waits until the earlier one is finished; if both are sequenced, until it is
// posted, because the box carries sequenced requests out in the order in which they are posted.
//
// Threads: one at a time (under the core's mutex).
#pragma once

#include <vector>

#include "box/client/operation.h"

namespace hbm::client::order {

// Whether an unfinished operation stands in the way of one that touches this.
bool blocked(const Touch& touch);

// Puts an operation behind all that were added before; its stage says whether it is ready.
void add(ClientOperation& operation);

// The operation's stage is kPosted, kFinished from now on. Returns those that became ready.
std::vector<ClientOperation*> posted(ClientOperation& operation);
std::vector<ClientOperation*> finished(ClientOperation& operation);

}  // namespace hbm::client::order
