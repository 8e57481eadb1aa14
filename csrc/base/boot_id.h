// The id of the kernel's boot, which tells machines apart.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm {

// The same in every process of a machine until it boots again; empty if the kernel tells none.
std::string boot_id();

}  // namespace hbm
