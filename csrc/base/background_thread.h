// A background thread that must stop before the process ends, because it uses memory and libraries
// that are cleaned up at the end.
//
// Threads: any thread may make and stop a BackgroundThread.
#pragma once

#include <functional>
#include <memory>

namespace hbm {

class BackgroundThread {
 public:
  // Runs `body` on a new thread, with the process' signals blocked. `interrupt` makes `body` return
  // soon. stop() calls `interrupt`, and so does the thread that ends the process, so `interrupt`
  // may be called twice. Both functions must own the objects that they use, because a `body` that
  // hangs outlives this object. Throws as start_thread().
  BackgroundThread(std::function<void()> body, std::function<void()> interrupt);
  ~BackgroundThread() { stop(); }
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Interrupts the body, and waits at most a second (kThreadEndTimeout) until the body has
  // returned. Does nothing in a forked child, which has no such thread.
  void stop();

 private:
  struct Run;
  class All;
  const std::shared_ptr<Run> run_;
};

}  // namespace hbm
