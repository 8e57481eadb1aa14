// The other ranks of a group, as one rank knows them: which have died or left, and which failures
// they have reported. Peers also publishes the failures that this rank reports.
// failure/failure_detector.h implements it for every communicator.
//
// Threads: any thread may call every member. After stop() the object learns nothing new about ranks
// on other nodes, and publishes nothing to them.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "progress/operation.h"

namespace hbm::communicator {

class Peers {
 public:
  virtual ~Peers() = default;

  // Throws if `operation` can never complete. Error(kDeath): a rank has died. Error(kPeer): a rank
  // has left or has reported a failure, or the group was claimed twice (claimed_twice()).
  // Error(kNetwork): the machine of a rank does not answer, or the store is gone, through which
  // ranks report failures. Does not wait.
  virtual void check(const progress::Operation& operation) = 0;

  // Returns a number that changes when check() may have learned something new about ranks on other
  // nodes. Costs one load.
  virtual uint64_t changes() const noexcept = 0;

  // Returns the description of a second claim: another process has come as one of the group's
  // ranks, so ranks of two jobs may have formed the group. Returns an empty text if no second claim
  // is known. Does not wait.
  virtual std::string claimed_twice() const = 0;

  // `operation` ended with `error`. Returns the error that caused `error`, or `error` itself if no
  // other cause is known. Waits for the cause: up to 1.5 s after an Error(kNetwork), and up to 500
  // ms for the sender's report after an OversizedMessage. Also waits up to 500 ms after a timeout
  // in which a local peer is missing, because this peer may itself wait for another node.
  virtual std::exception_ptr explain(const progress::Operation& operation,
                                     const std::exception_ptr& error) = 0;

  // Publishes an error that has broken the group on this rank. Ranks that wait then throw
  // Error(kPeer). If `error` is itself an Error(kPeer), another rank caused it, and ranks on other
  // nodes learn the cause from the store. So this rank then publishes it only to the ranks of its
  // node. Waits up to 200 ms for the store.
  virtual void report_failure(const std::exception& error) = 0;

  // Returns true if an Error(kPeer) of a send or receive means that the whole group has failed.
  // Returns false if the error may concern that message alone. Within a node a rank may cancel a
  // message, and then only the other rank of this message gets the error.
  virtual bool group_failed() const = 0;

  // Returns the ranks that are known to have died, ascending: ranks whose process has ended before
  // they left the group. Does not wait.
  virtual std::vector<int> dead() const = 0;

  // Returns the ranks that are known to have destroyed the group in good order, ascending. The
  // failure monitor then asks the store about the ranks in `wanted`, and a later call returns the
  // answer. For ranks of this node no answer of the store is needed. Does not wait.
  virtual std::vector<int> left(const std::vector<int>& wanted) const = 0;

  // Publishes that this rank destroys the group in good order. Waits for the store: up to 1 s, or
  // up to a minute if `all_came` is true and a rank serves the store. `all_came`: all ranks have
  // arrived at the destruction. Then only the store can be late, and the rank that serves it must
  // not end before the last answer. Throws the exception of Ctrl-C on the main thread.
  virtual void leave(bool all_came) = 0;

  // Waits up to 1 s until the store has the failure reports of this rank, unless the store is gone.
  // Without the reports, ranks on other nodes see only the end of this process, and raise its death
  // as the cause.
  virtual void finish_reports() = 0;

  // Stops watching the other ranks. Idempotent.
  virtual void stop() = 0;

  // Returns a text for errors, as in "3 (pid 4711 on host), 5 (pid 4712 on host)".
  virtual std::string list(const std::vector<int>& ranks) const = 0;
};

}  // namespace hbm::communicator
