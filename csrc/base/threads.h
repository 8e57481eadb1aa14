// Threads that a library starts: without the process' signals, or for a call that may never return.
//
// Threads: any; SignalsHeldOff acts on the one that makes it.
#pragma once

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <functional>

namespace hbm {

// Blocks every signal as long as it lives, but for those that tell of a crash: debuggers and
// sanitizers handle them. A thread that is started meanwhile keeps them blocked, so that signals
// reach the program's own threads.
class SignalsHeldOff {
 public:
  SignalsHeldOff() {
    sigset_t held;
    sigfillset(&held);
    for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&held, crash);
    pthread_sigmask(SIG_SETMASK, &held, &before_);
  }
  ~SignalsHeldOff() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeldOff(const SignalsHeldOff&) = delete;
  SignalsHeldOff& operator=(const SignalsHeldOff&) = delete;

 private:
  sigset_t before_;
};

// Runs a call that may never return (MPI_Init and MPI_Comm_create_group with a dead peer, for
// example) on a new thread and waits for it. Returns true once it has returned (what it threw is
// rethrown), false when the deadline came first: the thread then goes on alone, so `call` must own
// all that it touches. `check` is called a hundred times a second meanwhile, and ends the wait by
// what it throws.
bool run_abandonable(std::function<void()> call, std::chrono::steady_clock::time_point deadline,
                     const std::function<void()>& check = {});

}  // namespace hbm
