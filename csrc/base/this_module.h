// The location of the running code: the shared object that contains this library, or the program.
//
// Threads: the function may be called from any thread.
#pragma once

#include <string>

namespace hbm {

// Returns the directory, with a slash at its end; empty if the system does not know it.
std::string directory_of_this_module();

}  // namespace hbm
