// A group's latest operations, for a look after a hang: when an operation times out, the records of
// all groups of the process go to a file that PyTorch's flight recorder's reader understands, and
// what is not finished goes to the log.
//
// Threads: every member may be called from any thread. Lock order: that of the process's records,
// then one record's mutex_; nothing else is locked under them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "base/fork.h"
#include "process_group/operations.h"
#include "process_group/tuning.h"
#include "progress/operation_queue.h"

namespace hbm {

class FlightRecord {
 public:
  // One operation, as it was issued. Elements are those of all tensors together.
  struct Issued {
    const OperationKind* kind = nullptr;
    uint64_t sequence = 0;  // among the group's collectives; a message's is counted here
    int peer = -1;          // of a message; -1: none, or any
    c10::ScalarType dtype = c10::ScalarType::Byte;
    int64_t input_elements = 0;
    int64_t output_elements = 0;
    std::chrono::milliseconds timeout{};
  };

  // `global_ranks`: the members' ranks in the job, by rank in the group. `group` outlives the
  // record.
  FlightRecord(const c10d::Backend& group, std::vector<int> global_ranks);
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // Enters an operation and returns its number in this record. It is finished once `ticket` is done
  // without an error; without a ticket, by finish().
  uint64_t enter(Issued issued, std::shared_ptr<const Ticket> ticket = nullptr) noexcept;
  void finish(uint64_t number) noexcept;

  // Writes the records of all groups of this process to the file of this rank, and returns a line
  // for the log: the file's name, and what is unfinished in which group. A file that cannot be
  // written is said there.
  std::string write() const;

 private:
  struct Entry {
    Issued issued;
    uint64_t number = 0;     // 0: empty
    int64_t entered_ns = 0;  // since the epoch
    bool finished = false;
    std::shared_ptr<const Ticket> ticket;
  };
  struct Everyone;  // the records of this process

  // The entries with the oldest first, and of each whether it is finished.
  std::vector<Entry> entries() const;
  std::string unfinished(const std::vector<Entry>& entries) const;

  const c10d::Backend& group_;
  const std::vector<int> global_ranks_;
  const ForkGuard fork_;
  mutable std::mutex mutex_;  // guards the rest
  std::array<Entry, kRecordedOperations> kept_;
  uint64_t entered_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace hbm
