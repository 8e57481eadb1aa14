// The id of the kernel's boot, which identifies a machine.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm {

// Returns the id. Every process of a machine gets the same id until the next boot. Returns an empty
// string if the kernel has no such id.
std::string boot_id();

}  // namespace hbm
