// Names that no other process on any machine has.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <string>

namespace hbm::bootstrap {

// 128 random bits in hexadecimal: 32 characters.
std::string random_id();

// A random_id() of this process, the same on every call; a forked child has one of its own.
const std::string& process_id();

}  // namespace hbm::bootstrap
