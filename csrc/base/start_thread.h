// Starts threads, and names the limit where none can be started.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hbm {

// Runs `body` on a new thread. Throws std::system_error, whose text names the limit and how to
// raise it.
std::thread start_thread(std::function<void()> body);

// Returns which limit keeps this process from starting a thread, as far as it can tell: "the limit
// ...; raise it (ulimit -v)".
std::string thread_shortage();

}  // namespace hbm
