// Records the operations of this process' groups while the program asks for it (hbmcomm.profile()),
// and adds them up for the metrics (HBMCOMM_METRICS). docs/profile.md describes the figures.
//
// The records of the latest operations are in a ring, from which a profile and the totals are made.
// An operation is in the totals if its record is still in the ring when it ends.
//
// Threads: every member may be called from any thread. One mutex guards the records of the process;
// nothing else is called under it. While nothing is recorded, on() is the only cost.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "process_group/operations.h"
#include "process_group/profile_totals.h"
#include "progress/observation.h"

namespace hbm::process_group {

class Profile {
 public:
  enum class Place {
    kSegment,   // all tensors are in the segment of the group
    kOrdinary,  // at least one tensor is not
    kDevice,    // on an accelerator
  };
  // A group, as its operations name it.
  struct Group {
    std::string key;  // a hash: equal on all ranks, and no other group has it
    std::string name;
    int rank = 0;            // of this process, in the group
    std::vector<int> ranks;  // each rank's number in the job
    std::vector<int> nodes;  // of each rank, as GroupConnection::node_of
    Path path_of_collectives = Path::kShm;
    Path path_of_messages = Path::kShm;
  };
  struct Issued {
    std::shared_ptr<const Group> group;
    const OperationKind* kind = nullptr;
    uint64_t sequence = 0;           // of a collective; 0: a message
    int peer = -1;                   // of a message; -1: none, or any
    int64_t bytes = 0;               // of the inputs, or of the outputs if there are more
    Place place = Place::kOrdinary;  // of the tensors
    bool async = false;

    Path path() const {
      return sequence == 0 ? group->path_of_messages : group->path_of_collectives;
    }
  };
  // Times are of CLOCK_MONOTONIC, in ns.
  struct Operation {
    Issued issued;
    uint64_t number = 0;  // from 1 on
    int64_t begin_ns = 0;
    int64_t end_ns = 0;  // 0: not ended, or failed
    progress::Observation observed{};
    int64_t waited_ns = 0;  // the time that threads have waited for it
    int64_t busy_ns = 0;   // processor time of the issuing thread from the issue to the end or wait
    clockid_t thread = 0;  // the processor time of the issuing thread
    int64_t thread_ns = 0;  // at the end of the call that issued it
    bool returned = false;  // the call that issued it has ended
    bool counted = false;   // busy_ns is final
  };
  struct Records {
    int64_t begin_ns = 0;
    int64_t end_ns = 0;
    uint64_t lost = 0;        // the number of operations before the oldest record
    std::string first_group;  // the key of the first group of this process; empty: no group
    std::vector<Operation> operations;
  };

  // This process has formed a group.
  static void formed(const Group& group);

  static bool on() noexcept { return on_.load(std::memory_order_relaxed); }
  static int64_t now() noexcept;

  // Begins to record. Returns false if this process records already.
  static bool start();
  // Ends the recording, and returns the latest kProfiledOperations operations, oldest first.
  static Records stop();

  // Begins to add up. The totals grow until the process ends. Does nothing after the first call.
  static void start_totals();
  // Returns a copy of the totals; empty before start_totals().
  static ProfileTotals totals();

  // Records that an operation is issued; returns its number. 0: nothing is recorded. The other
  // functions do nothing for the number 0, and for an operation that is no longer in the records.
  static uint64_t issue(Issued issued) noexcept;
  // The call that issued the operation returns.
  static void returned(uint64_t number) noexcept;
  static void ended(uint64_t number, const progress::Observation& observed) noexcept;
  // A thread begins to wait for the operation; or has waited since `begin`, a now().
  static void wait_begins(uint64_t number) noexcept;
  static void waited(uint64_t number, int64_t begin) noexcept;

 private:
  static inline std::atomic<bool> on_{false};
};

}  // namespace hbm::process_group
