// Starts threads, and names the limit if none can be started.
//
// Threads: any.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hbm {

// Runs `body` on a new thread. If no thread can be started, throws std::system_error; its text
// names the limit and how to raise it.
std::thread start_thread(std::function<void()> body);

// Returns a text that names the limit that keeps this process from starting a thread: "...; raise
// the limit (ulimit -v)". If enough address space is left for a stack, the text names all limits on
// threads.
std::string thread_shortage();

}  // namespace hbm
