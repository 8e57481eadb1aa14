// Names the limit of open files where a process has reached it.
#pragma once

#include <string>

namespace hbm {

// Returns the end of an error's text if this process has few descriptors left or none, which
// accounts for much: "; this process has too many open files ... (raise ulimit -n)". Empty
// otherwise.
std::string shortage_of_descriptors();

}  // namespace hbm
