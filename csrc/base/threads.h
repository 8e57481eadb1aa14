// For threads that a library starts: blocks the process' signals in them, or abandons a thread
// whose call does not return.
//
// Threads: any; SignalsHeldOff acts on the thread that makes it.
#pragma once

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <functional>

namespace hbm {

// Blocks every signal during its lifetime, except signals of a crash, which debuggers and
// sanitizers handle. A thread started during this lifetime keeps the signals blocked, so that
// signals reach the program's own threads.
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

// Runs a call that may never return (such as MPI_Init and MPI_Comm_create_group with a dead peer)
// on a new thread and waits for it. Returns true if the call has returned; its exception is
// rethrown. Returns false at the deadline: the thread then continues alone, so `call` must own all
// objects that it uses. Calls `check` a hundred times a second during the wait; an exception of
// `check` ends the wait. Throws as start_thread() if no thread can be started.
bool run_abandonable(std::function<void()> call, std::chrono::steady_clock::time_point deadline,
                     const std::function<void()>& check = {});

}  // namespace hbm
