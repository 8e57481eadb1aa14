// The TCP connections of MPI. Wakes threads that wait for messages over TCP, and reads how long a
// message and its answer take. MPI has no wait that sleeps until a message or a
// deadline comes, but UCX collects its connections in epoll descriptors. Such a descriptor is
// readable while a connection has data to receive, or has room again for data to send.
//
// TCP links (tcp/links.h) have such a descriptor too.
//
// This class reads nothing from these descriptors and does not change them. The descriptors become
// readable for messages over TCP. Messages through shared memory, and messages that another thread
// has received already by polling, do not make them readable. If MPI has opened a device, such
// as an RDMA card, messages may bypass TCP: collect() then uses no descriptor.
//
// Threads: one thread calls a constructor and collect(), before other threads use the object. Any
// thread may call connected(), sleep() and round_trip().
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "progress/operation.h"

namespace hbm::communicator::mpi {

class Arrivals {
 public:
  // Records the open descriptors of this process. REQUIRES: called before MPI_Init.
  Arrivals();
  // Duplicates an epoll descriptor that watches TCP connections. Throws Error(kUnavailable) if this
  // process can open no more descriptors. REQUIRES: collect() is not called.
  explicit Arrivals(int poll);
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Finds the epoll descriptors that were opened since the constructor. Finds none if a device was
  // opened as well. REQUIRES: called after MPI_Init.
  void collect() noexcept;

  // Returns true once UCX is known to have a TCP connection. MPI connects when it sends the first
  // messages, unless it uses other transports.
  bool connected();

  // Sleeps until a connection has data to receive, at most until `until`. Returns Slept::kNoWakeup
  // if no connection is known.
  progress::Slept sleep(std::chrono::steady_clock::time_point until);

  // Returns the round-trip time of the most distant peer, as the kernel has measured it on the
  // connections; 0 if no connection is known. The least of several measurements counts, so traffic
  // does not raise it. Reads it again after kRoundTripPeriod.
  std::chrono::microseconds round_trip();

 private:
  std::vector<int> before_;  // open before MPI_Init; empty: could not be listed
  std::vector<int> polls_;   // duplicates of epoll descriptors, in case their owner closes its own
  // Loads and stores of these are relaxed, because they guard no other data.
  std::atomic<bool> connected_{false};
  std::atomic<std::chrono::steady_clock::rep> next_check_{0};
  std::atomic<std::chrono::steady_clock::rep> next_reading_{0};
  std::atomic<std::chrono::microseconds::rep> round_trip_{0};
};

}  // namespace hbm::communicator::mpi
