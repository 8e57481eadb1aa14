// Starts threads, and names the limit if none can be started.
//
// Threads: any.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hbm {

// Runs `body` on a new thread. Throws std::system_error, whose text names the limit and how to
// raise it.
std::thread start_thread(std::function<void()> body);

// Returns the limit that keeps this process from starting a thread, as far as it is known: "the
// limit ...; raise it (ulimit -v)".
std::string thread_shortage();

}  // namespace hbm
