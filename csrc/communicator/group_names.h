// Names of groups by their number, for errors. The header of a message over MPI has the number of
// the message's group. A message that no rank received may arrive in a later group of the same
// ranks; the error then names the group that sent the message.
//
// Threads: any thread may call both functions.
#pragma once

#include <cstdint>
#include <string>

namespace hbm::communicator {

// Remembers the name of the group with this number, for errors. REQUIRES: this process is a rank of
// the group.
void name_group(uint64_t number, const std::string& group);

// Returns the name, as in "group \"3\"". Returns "a group of number 4711" if this process is no
// rank of the group, or has named kRememberedGroupNames groups since.
std::string name_of_group(uint64_t number);

}  // namespace hbm::communicator
