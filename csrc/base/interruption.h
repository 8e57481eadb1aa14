// Ctrl-C during a wait. A thread that waits in C++ periodically checks for an interruption, because
// Python's own handler runs only after the wait.
//
// Threads: any. Only the main thread is ever interrupted.
#pragma once

#include <exception>

namespace hbm {

// Returns the exception that ends the caller's wait, or null. May take Python's lock, so the caller
// must hold no lock. Never throws.
using InterruptionCheck = std::exception_ptr (*)();

// Installs the check. Until then, waits are never interrupted. The module calls this once, when it
// is loaded.
void set_interruption_check(InterruptionCheck check) noexcept;

// Calls the check on the main thread. Returns null on other threads, and if no check is installed.
std::exception_ptr interruption() noexcept;

}  // namespace hbm
