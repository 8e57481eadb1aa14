// Names the limit of open files if a process has reached it.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm {

// Returns the end of an error's text if this process has no more than kFewDescriptorsLeft
// descriptors left, a likely cause of the error: "; this process has too many open files ... (raise
// ulimit -n)". Empty otherwise.
std::string shortage_of_descriptors();

}  // namespace hbm
