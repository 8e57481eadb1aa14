// What errors call the groups whose messages bear a number: a message that nobody received may
// come up in a later group of the same ranks, and its error names the group that it is of.
//
// Threads: both may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

namespace hbm {

// This process takes part in the group of that number, which errors call `group`.
void name_group(uint64_t number, const std::string& group);

// "group \"3\""; "a group of number 4711" if this process was not in it, or has been in many since.
std::string name_of_group(uint64_t number);

}  // namespace hbm
