// The id of the kernel's boot, which identifies a machine.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm {

// Returns the id: the same in every process of a machine until its next boot. Empty if the kernel
// has none.
std::string boot_id();

}  // namespace hbm
