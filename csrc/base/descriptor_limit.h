// Names the limit of open files if a process has reached it.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm {

// Returns a text to append to an error: "; this process has too many open files ... (raise ulimit
// -n)". Returns an empty string if more than kFewDescriptorsLeft descriptors are left, because the
// error then has another cause.
std::string shortage_of_descriptors();

}  // namespace hbm
