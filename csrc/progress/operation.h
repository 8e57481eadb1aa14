// A communication operation, which the queue drives and which never blocks.
//
// An operation is a small state machine. begin() posts what needs no peer, and each poll() moves on
// as far as the peers' messages allow, so one operation can be carried by whichever thread has time
// for it: the caller, whoever waits, or the queue's worker.
//
// Threads: the queue calls begin(), poll() and abandon() from one thread at a time, with
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

// What came of a short sleep.
enum class Slept {
  kUntold,   // it did not sleep, for nothing would have woken it
  kThrough,  // the time is over
  kWoken,    // something has come
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

  // Sleeps until poll() may find something new, at most until `until`. False, at once, if the
  // operation knows of no such notice: the caller then polls at intervals. Throws Error(kDeath)
  // when a rank that it waits for is known to be dead, Error(kPeer) when one has reported a
  // failure.
  virtual bool wait(std::chrono::steady_clock::time_point /*until*/) { return false; }

  // Sleeps for at most `most`, and ends early when something has come that poll() may take in, if
  // not enough of it for a step. Called by a driver that has looked for a while in vain, and to
  // which wait() was false, if it might wait for this operation alone.
  virtual Slept doze(std::chrono::microseconds /*most*/) { return Slept::kUntold; }

  // Whether wait() sleeps, so that one may wait for this operation on behalf of others, too.
  virtual bool gives_notice() const { return false; }

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
