// Names groups by the number that their messages bear, for errors: a message that nobody received
// may come up in a later group of the same ranks, and the error names the group that it is of.
//
// Threads: both may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

namespace hbm {

// Keeps what errors call the group of that number, in which this process takes part.
void name_group(uint64_t number, const std::string& group);

// Returns "group \"3\""; or "a group of number 4711" if this process was not in it, or has been in
// many since.
std::string name_of_group(uint64_t number);

}  // namespace hbm
