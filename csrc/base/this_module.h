// Where the code that runs lies: the shared object that this library was linked into, or the
// program.
//
// Threads: the function may be called from any thread.
#pragma once

#include <string>

namespace hbm {

// The folder, with a slash at its end; empty where the system does not tell.
std::string folder_of_this_module();

}  // namespace hbm
