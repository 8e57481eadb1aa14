// Keeps a process' signals away from threads that a library starts: the program's own take them.
//
// Threads: any; it acts on the one that makes it.
#pragma once

#include <pthread.h>

#include <csignal>

namespace hbm {

// Blocks every signal as long as it lives, but for those that tell of a crash, which whoever
// handles them wants to see; a thread that is started meanwhile keeps them blocked.
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

}  // namespace hbm
