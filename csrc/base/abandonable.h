// Runs a call that may never return (MPI_Init and MPI_Comm_create_group with a dead peer, for
// example) on a thread of its own, and stops waiting for it at a deadline.
#pragma once

#include <chrono>
#include <functional>

namespace hbm {

// Runs `call` on a new thread and waits for it. Returns true once it has returned (what it threw is
// rethrown), false when the deadline came first: the thread then goes on alone, so `call` must own
// all that it touches.
bool run_abandonable(std::function<void()> call, std::chrono::steady_clock::time_point deadline);

}  // namespace hbm
