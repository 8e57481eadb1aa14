// Bounds of the memory and the files of this process, for the messages that name it.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

namespace hbm::memory {

// RLIMIT_*, in bytes; the largest number when there is none.
uint64_t soft_limit(int resource) noexcept;

// "; NAME is N", or nothing when there is no limit.
std::string limit_text(int resource, const char* name);

// Tells why the kernel may have refused a private mapping of so many bytes, and what to
// do: the limits that are set (ulimit), the machine's overcommit; else the address space and the
// number of mappings.
std::string bounds_of_mappings(uint64_t bytes);

}  // namespace hbm::memory
