// Ctrl-C during a wait: the one who waits in C++ asks now and then whether to give up, because
// Python's own handler runs only once the wait is over.
//
// Threads: any. Only the main thread is ever interrupted.
#pragma once

#include <exception>

namespace hbm {

// Returns what the caller is to throw in place of waiting on, or null. May take Python's lock, so
// the caller holds none. Never throws.
using InterruptionCheck = std::exception_ptr (*)();

// Installs the check; until then nothing interrupts. Called once, when the module is loaded.
void set_interruption_check(InterruptionCheck check) noexcept;

// Calls the check, on the main thread; null elsewhere, and where there is none.
std::exception_ptr interruption() noexcept;

}  // namespace hbm
