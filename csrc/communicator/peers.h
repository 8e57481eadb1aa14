// The other ranks of a group, as one rank knows them: who has died, who has left, and what has
// failed; and what it tells them. failure/failure_detector.h implements it for every communicator.
//
// Threads: every member may be called from any thread. After stop() nothing is learnt or told.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "progress/operation.h"

namespace hbm {

class Peers {
 public:
  virtual ~Peers() = default;

  // Throws if `operation` can never complete: Error(kDeath) for a rank that has died, Error(kPeer)
  // for one that has left or has reported a failure, Error(kNetwork) if such reports come no more.
  // Does not wait.
  virtual void check(const Operation& operation) = 0;

  // Returns why the group cannot be trusted any more, if another process has come as one of its
  // ranks: ranks of two jobs may have formed it. Empty: none is known to. Does not wait.
  virtual std::string claimed_twice() const = 0;

  // The error that `error`, in which `operation` ended, is the consequence of; `error` itself if
  // there is none. Waits up to 1.5 s for the cause where another rank is likely to know it, 500 ms
  // for the sender's report after an OversizedMessage.
  virtual std::exception_ptr explain(const Operation& operation,
                                     const std::exception_ptr& error) = 0;

  // Tells the other ranks of an error that has broken the group here: those that wait end with
  // Error(kPeer). An Error(kPeer) came from another rank, so it goes to those alone that cannot
  // have heard of it, on this node. Waits up to 200 ms for the store.
  virtual void report_failure(const std::exception& error) = 0;

  // Whether an Error(kPeer) of a point-to-point operation is the whole group's. Within a node a
  // rank may give up a single transfer, whose peer then gets that error.
  virtual bool group_failed() const = 0;

  // Ranks that are known to have died: whose process has ended before they left the group;
  // ascending. Does not wait.
  virtual std::vector<int> dead() const = 0;

  // Ranks that are known to have destroyed the group in good order; ascending. Those of `wanted`
  // that lie on other nodes are asked for, so that they are known some moments later. Does not
  // wait.
  virtual std::vector<int> left(const std::vector<int>& wanted) const = 0;

  // Tells the other ranks that this one destroys the group in good order. Waits up to 1 s for the
  // store.
  virtual void leave() = 0;

  // Waits up to 1 s until the store has what this rank has reported, unless the store is gone: a
  // rank that ends before has died, as far as the others know.
  virtual void finish_reports() = 0;

  // Ends what watches the other ranks in the background. Idempotent.
  virtual void stop() = 0;

  // "3 (pid 4711 on host), 5 (pid 4712 on host)", for errors.
  virtual std::string list(const std::vector<int>& ranks) const = 0;
};

}  // namespace hbm
