// Liveness connections: TCP connections between processes of different nodes. After a greeting, a
// connection carries no data. The kernel closes it when one of its two processes ends for any
// reason, and the other process notices this. While a process is stopped, its kernel still answers
// probes. A process keeps its connections, for all its groups, until one of the two processes ends.
//
// A forked child closes its copies, so that it does not keep the connections of its parent open.
//
// Threads: one thread at a time.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"

namespace hbm::communicator::failure {

class LivenessConnections {
 public:
  // `self`: bootstrap::process_id() of this process.
  explicit LivenessConnections(std::string self);
  ~LivenessConnections();
  LivenessConnections(const LivenessConnections&) = delete;
  LivenessConnections& operator=(const LivenessConnections&) = delete;

  // Starts to listen, unless it listens already. Returns the port and the addresses of this
  // machine. Returns an empty text, and sets `failure`, if the kernel refuses.
  std::string listen(std::string& failure);

  // Stops listening. Existing connections stay.
  void stop_listening();

  // Starts to connect to a process. `where`: the result of listen() in that process. `near`: true
  // if that process is in the same network namespace as this process. Loopback addresses are tried
  // only if `near` is true: otherwise they would lead to this process's own machine.
  void call(const std::string& process, const std::string& where, bool near);

  // connected() returns true if the connection to `process` is up. calling() returns true while
  // this process connects, or waits for the reply. greeted() returns true once this process has
  // identified itself, so that `process` detects the end of this process.
  bool connected(const std::string& process) const;
  bool calling(const std::string& process) const;
  bool greeted(const std::string& process) const;

  void add_to(std::vector<pollfd>& waits) const;

  // Takes the next step of every connection that is ready, without waiting. Returns the processes
  // that have ended.
  std::vector<std::string> advance();

  // Returns the time for which the machine of a connected process has not answered; no value
  // without a connection.
  std::optional<std::chrono::milliseconds> silence(const std::string& process) const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Step { kConnecting, kGreeted, kAccepted, kUp, kClosed };
  struct LivenessConnection {
    Step step;
    std::string process;  // empty: a caller that has not identified itself
    Descriptor socket;
    std::vector<std::string> addresses;  // addresses not tried yet
    uint16_t port = 0;
    Clock::time_point until;  // the deadline of this step
  };

  bool try_next_address(LivenessConnection& connection);
  void advance(LivenessConnection& connection);
  void accept_callers();
  void close(LivenessConnection& connection);

  const std::string self_;
  Descriptor listener_;
  std::string where_;
  std::vector<LivenessConnection> connections_;
  Clock::time_point accept_after_{};  // no caller is accepted before this time
};

}  // namespace hbm::communicator::failure
