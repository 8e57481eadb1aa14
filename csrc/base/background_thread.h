// A thread that works in the background and has to be done before the process ends: it uses what
// the libraries' own clean-up takes away.
//
// Threads: any thread may make one and stop it.
#pragma once

#include <functional>
#include <memory>

namespace hbm {

class BackgroundThread {
 public:
  // Runs `body` on a thread of its own, with the process' signals held off. `interrupt` makes it
  // return soon; stop() and the end of the process call it, perhaps both, from their thread. Both
  // own what they use: a body that hangs outlives this object.
  BackgroundThread(std::function<void()> body, std::function<void()> interrupt);
  ~BackgroundThread() { stop(); }
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Interrupts the body and waits until it has returned, a second at most. In a forked child, which
  // has no such thread, does nothing.
  void stop();

 private:
  struct Run;
  class All;
  const std::shared_ptr<Run> run_;
};

}  // namespace hbm
