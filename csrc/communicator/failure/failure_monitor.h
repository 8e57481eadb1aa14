// Watches the ranks of a group over several nodes: who has died, who has left, and what has failed.
//
// A thread of its own does all that may block: it asks the store, looks at the connections between
// nodes (NodeDeathWatch) and at the processes of this node, four times a second, and passes on what
// it sees. Whoever waits for an operation reads its notes. So a death has a witness even while that
// rank computes, and a store that does not answer delays nobody.
//
// Threads: every member may be called from any thread. The thread owns what it uses, and ends by
// itself after stop(), also if the store never answers. stop() and the end of the process wait for
// that, a second at most.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "bootstrap/key_value.h"
#include "progress/operation.h"

namespace hbm::failure {

class FailureMonitor {
 public:
  struct MonitorSetup {
    std::string group;  // as errors name it
    int rank;
    std::vector<std::string> names;  // of the ranks, for errors: "rank 3 (pid 4711 on host)"
    std::shared_ptr<KeyValue> store;
    std::string prefix;  // of the group's keys
    // Ranks whose death this rank can see; called by the thread.
    std::function<std::vector<int>()> dead;
  };

  explicit FailureMonitor(MonitorSetup setup);
  ~FailureMonitor() { stop(); }
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  // Throws Error(kDeath), Error(kPeer) or Error(kNetwork) if the operation can never complete.
  void check(const Operation& operation);

  // Tells all of a failure. The process may end soon after, so this waits a moment (200 ms at most)
  // for the thread to have told the store.
  void report(const std::string& failure);

  // Ranks that are known to have died.
  std::vector<int> dead() const;

  // Tells all that this rank has left in good order; waits until that is in the store, or
  // `patience` is over.
  void leave(std::chrono::milliseconds patience);

  void stop();

 private:
  struct Notes;
  class Threads;
  static void run(const std::shared_ptr<Notes>& notes);

  const ForkGuard fork_;
  const std::shared_ptr<Notes> notes_;
};

}  // namespace hbm::failure
