// Connections between processes of different nodes, by which one learns of the other's end: the
// kernel closes them when a process ends, whatever ended it, and answers for a process that is
// stopped. They carry no data. A process keeps its links until one of the two ends, for all groups.
//
// A forked child closes its copies, so that it does not keep its parent's links open.
//
// Threads: one thread at a time.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"

namespace hbm::failure {

class NodeLinks {
 public:
  // `self` is this process' bootstrap::process_id().
  explicit NodeLinks(std::string self);
  ~NodeLinks();
  NodeLinks(const NodeLinks&) = delete;
  NodeLinks& operator=(const NodeLinks&) = delete;

  // Listens, if it does not yet, and returns where: a port and this machine's addresses. Empty if
  // the kernel refuses.
  std::string listen();

  // Takes no new links; those that there are stay.
  void stop_listening();

  // Begins to call a process that listens at `where`. Addresses of the loopback mean this machine,
  // so they count only if the other process is `near`, in the same network namespace.
  void call(const std::string& process, const std::string& where, bool near);

  // Whether there is a link to the process, or a call under way, or this process has told the other
  // who it is: from then on that one learns of this one's end.
  bool linked(const std::string& process) const;
  bool calling(const std::string& process) const;
  bool greeted(const std::string& process) const;

  void add_to(std::vector<pollfd>& waits) const;

  // Goes on with what has become ready, without waiting. Returns the processes that have ended.
  std::vector<std::string> advance();

  // How long the machine of a linked process has not answered; nothing without a link.
  std::optional<std::chrono::milliseconds> silence(const std::string& process) const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Step { kConnecting, kGreeted, kAccepted, kUp, kClosed };
  struct NodeLink {
    Step step;
    std::string process;  // empty: a caller that has not said who it is
    Descriptor socket;
    std::vector<std::string> addresses;  // still to be tried
    uint16_t port = 0;
    Clock::time_point until;  // of this step
  };

  bool try_next_address(NodeLink& link);
  void advance(NodeLink& link);
  void accept_callers();
  void close(NodeLink& link);

  const std::string self_;
  Descriptor listener_;
  std::string where_;
  std::vector<NodeLink> links_;
  Clock::time_point accept_after_{};  // when there may be a descriptor for a caller again
};

}  // namespace hbm::failure
