// A communication operation, which the queue drives. Its begin() and poll() never block.
//
// An operation is a state machine. begin() posts everything that needs no peer. Each poll() then
// advances as far as the peers' messages allow. So any thread with time can drive it: the caller, a
// thread that waits for the operation, or a worker of the queue.
//
// Threads: the queue calls begin(), poll(), sleep() and abandon() from one thread at a time, with
// happens-before between the calls; an operation needs no lock of its own.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "progress/observation.h"

namespace hbm::progress {

enum class Progress {
  kIdle,    // no progress: the caller may back off
  kActive,  // some progress
  kDone,    // complete; poll() is not called again
};

// The reason why sleep() returned.
enum class Slept {
  kNoWakeup,  // immediately: nothing would wake the sleeper, so the caller polls at intervals
  kTimedOut,  // at `until`
  kWoken,     // before `until`: poll() may make progress
};

class Operation {
 public:
  virtual ~Operation() = default;

  // Posts everything that needs no peer, such as copies of the input. Called once, before the first
  // poll().
  virtual void begin() = 0;

  // Advances as far as possible without waiting. Not called again after kDone.
  virtual Progress poll() = 0;

  // Returns a description of the operation for errors, as in: allreduce #7 (SUM) of 1000 float32
  // on rank 0 of group "0"
  virtual std::string describe() const = 0;

  // Returns the group ranks that this operation waits for; a timeout names them.
  virtual std::vector<int> missing() const = 0;

  // Returns the group ranks without which the operation cannot complete. This includes ranks whose
  // data for the current step have arrived, if a later step needs more data from them. The death of
  // such a rank on another node ends the operation.
  virtual std::vector<int> needed() const { return missing(); }

  // Sleeps until poll() may make progress, at most until `until`. The progress thread calls it
  // after a poll() that was kIdle, first with `polled` false: the operation may spin before it
  // sleeps. If this first call returned kNoWakeup, the progress thread polls further. After long
  // polling without progress, it calls sleep() with `polled` true: the operation does not spin. MPI
  // makes progress only in polls. So an operation that waits for MPI does not sleep in a call with
  // `polled` false.
  //
  // A call with an `until` in the past does not sleep. It only tells whether anything would wake
  // the sleeper; kNoWakeup means that nothing would. The progress thread of several operations
  // calls sleep() of all except the first in this way, with `polled` true. If none returned
  // kNoWakeup, it calls sleep() of the first operation. REQUIRES: progress of any of these
  // operations ends that sleep.
  //
  // No wake-up is lost. The sleeper announces itself, then checks that nothing has arrived since
  // its poll(). A peer stores its data for the sleeper, then checks whether a sleeper has announced
  // itself. Sequentially consistent accesses and fences keep both orders. So the sleeper sees the
  // data, or the peer sees the sleeper (docs/design/shared-memory.md, "Memory order"). An operation
  // that waits for a message within the node compares the rank's count of rings with the count at
  // the start of the operation's last poll(). Rings for all messages raise this count. The first
  // message is polled before the others, so its sleep misses no ring for them. Data of a TCP
  // connection stays readable until MPI reads it, so it also ends a sleep that begins later.
  // Changes of the queue's own state, such as an abort, arrive by Communicator::wake(). A sleeper
  // that misses such a wake-up wakes within 10 ms, because the queue limits `until`.
  //
  // A call with `polled` false may throw Error(kDeath), if a rank that the operation waits for is
  // dead. It may throw Error(kPeer), if such a rank has left, or any rank has reported a failure.
  virtual Slept sleep(std::chrono::steady_clock::time_point /*until*/, bool /*polled*/) {
    return Slept::kNoWakeup;
  }

  // Cancels everything pending, after an error or a timeout. Memory that a late message may still
  // be written to stays alive. Only the destructor is called afterwards.
  virtual void abandon() noexcept = 0;

  // Returns true, after abandon(), if other ranks may still write to the caller's buffers. The
  // buffers must then not be reused.
  virtual bool peers_may_write() const { return false; }

  // Returns true if begin() alone hands the peers everything that they need from this rank, so that
  // no peer waits while this rank computes. Such an operation may stay undriven for a while.
  virtual bool self_sufficient() const = 0;

  // Returns the facts that the operation has noted of itself. They are complete when poll() has
  // returned kDone. Called by the thread of that poll(), before the operation is destroyed: no
  // other thread accesses the operation then, so the facts need no atomics.
  const Observation& observed() const noexcept { return observed_; }

 protected:
  Observation observed_;
};

}  // namespace hbm::progress
