// A communication operation, which the queue drives and which never blocks.
//
// An operation is a small state machine. begin() posts what needs no peer, and each poll() moves on
// as far as the peers' messages allow, so one operation can be carried by whichever thread has time
// for it: the caller, whoever waits, or the queue's worker.
//
// Threads: the queue calls begin(), poll(), sleep() and abandon() from one thread at a time, with
// happens-before between the calls; an operation needs no lock of its own.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace hbm {

enum class Progress {
  kIdle,    // nothing new: the caller may back off
  kActive,  // something moved
  kDone,    // complete; poll() is not called again
};

// How a sleep ended.
enum class Slept {
  kNoWakeup,  // immediately: nothing would wake the sleeper, so the caller polls at intervals
  kTimedOut,  // at `until`
  kWoken,     // before: poll() may find something new
};

class Operation {
 public:
  virtual ~Operation() = default;

  // Copies in and posts what needs no peer. Called once, before the first poll().
  virtual void begin() = 0;

  virtual Progress poll() = 0;

  // For errors: allreduce #7 (SUM) of 1000 float32 on rank 0 of group "0"
  virtual std::string describe() const = 0;

  // Group ranks that this operation waits for: those that a timeout names.
  virtual std::vector<int> missing() const = 0;

  // Group ranks without which it cannot complete: also those whose part in this step has come, but
  // not that in a later one. The death of one on another node ends the operation.
  virtual std::vector<int> needed() const { return missing(); }

  // Sleeps until poll() may find something new, at most until `until`. The driver calls it after a
  // poll() that was kIdle, first with `polled` false: the operation may spin before it sleeps. If
  // that was kNoWakeup, the driver polls on. Once it has polled for long without progress, it calls
  // sleep() with `polled` true: the operation does not spin. An operation over MPI, which moves
  // only while it is polled, does not sleep before.
  //
  // An `until` that has passed asks whether anything would wake the sleeper: kNoWakeup or not. The
  // driver of several operations asks all but the first, with `polled` true, and sleeps for the
  // first one if none was kNoWakeup. REQUIRES: such a sleep ends for each of them.
  //
  // No wake-up is lost. The sleeper announces itself, then checks that nothing has come since its
  // poll(); a peer stores what it has for the sleeper, then checks whether a sleeper has announced
  // itself. All four steps are sequentially consistent, so one of the two sees the other
  // (docs/design/shared-memory.md, "Memory order"). Transfers within a node check the count of
  // rings that their last poll() began with, and each ring counts, whichever transfer it is for: so
  // the first transfer, which is polled before the others, sleeps for all. Data of a TCP connection
  // stays readable until MPI reads it. The queue's own state, such as an abort, comes by
  // Communicator::wake(); a sleeper that misses that wakes within 10 ms, as the queue sets `until`.
  //
  // Throws, with `polled` false, Error(kDeath) if a rank that it waits for is known to be dead,
  // Error(kPeer) if one has reported a failure.
  virtual Slept sleep(std::chrono::steady_clock::time_point /*until*/, bool /*polled*/) {
    return Slept::kNoWakeup;
  }

  // Gives up what is pending after an error or a timeout; memory that a late message may still be
  // written to stays alive until it cannot be. No call follows but the destructor.
  virtual void abandon() noexcept = 0;

  // True, after abandon(), if other ranks may still write to the caller's buffers, which must then
  // not be used for anything else.
  virtual bool peers_may_write() const { return false; }

  // True when begin() alone hands the peers all that they need of this rank, so that nobody else
  // waits while this rank computes. Such an operation may stay undriven for a while.
  virtual bool self_sufficient() const = 0;
};

}  // namespace hbm
