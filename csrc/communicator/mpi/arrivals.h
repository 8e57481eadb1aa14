// Notice of what comes over TCP, for threads that wait for messages. MPI has no call to sleep in,
// but UCX collects its connections in an epoll descriptor of its own, which is readable while one
// of them has something to take in (or has room again for what was waiting to be sent).
//
// Nothing is read from the descriptors or changed in them. They tell of messages that cross a
// network if MPI has opened no other device; of messages through shared memory they never tell, nor
// of those that another thread, which polls MPI, has taken in already.
//
// Threads: the constructor and collect() before others use it; connected() and sleep() from any.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "progress/operation.h"

namespace hbm::mpi {

class Arrivals {
 public:
  // Notes which descriptors this process has: before MPI_Init.
  Arrivals();
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Keeps the epoll descriptors that came since; none if devices came too: after MPI_Init.
  void collect() noexcept;

  // Whether a connection is known: MPI makes them with the first messages, or has other ways.
  bool connected();

  // Sleeps until a connection has something to take in, at most until `until`. Returns
  // Slept::kNoWakeup if no connection is known.
  Slept sleep(std::chrono::steady_clock::time_point until);

 private:
  std::vector<int> before_;  // empty: they could not be listed
  std::vector<int> polls_;   // duplicates, so that nobody else's descriptor can take their place
  // Relaxed (both): they guard nothing.
  std::atomic<bool> connected_{false};
  std::atomic<std::chrono::steady_clock::rep> looks_again_{0};
};

}  // namespace hbm::mpi
