// A record of a group's latest operations, to diagnose a hang. When an operation times out, on this
// rank or another, the process writes the records of all its groups to a file. The file has the
// format of PyTorch's flight recorder. Unfinished operations are also logged.
//
// Threads: every member may be called from any thread. Lock order: the lock of the process's list
// of records, then one record's mutex_; no other lock is taken under them.
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

namespace hbm::process_group {

class FlightRecord {
 public:
  // An operation, as it was issued. Element counts are sums over all tensors.
  struct Issued {
    const OperationKind* kind = nullptr;
    uint64_t sequence = 0;  // the number of a collective; the record numbers messages
    int peer = -1;          // of a message; -1: none, or any
    c10::ScalarType dtype = c10::ScalarType::Byte;
    int64_t input_elements = 0;
    int64_t output_elements = 0;
    std::chrono::milliseconds timeout{};
  };

  // `global_ranks` has each rank's number in the job, indexed by its rank in the group. `group`
  // outlives the record.
  FlightRecord(const c10d::Backend& group, std::vector<int> global_ranks);
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // Enters an operation and returns its number in this record. The operation is finished once
  // `request` is done without an error; without a request, once finish() is called.
  uint64_t enter(Issued issued,
                 std::shared_ptr<const progress::Request> request = nullptr) noexcept;
  void finish(uint64_t number) noexcept;

  // Writes the records of all groups of this process to the file of this rank. Returns a line for
  // the log: the file's name, and the unfinished operations of each group. If the file cannot be
  // written, the line says why.
  std::string write() const;

 private:
  struct Entry {
    Issued issued;
    uint64_t number = 0;     // 0: the entry is empty
    int64_t entered_ns = 0;  // since the epoch
    bool finished = false;
    std::shared_ptr<const progress::Request> request;
  };
  struct AllRecords;  // of this process

  // Returns the entries, oldest first, with `finished` up to date.
  std::vector<Entry> entries() const;
  std::string unfinished(const std::vector<Entry>& entries) const;

  const c10d::Backend& group_;
  const std::vector<int> global_ranks_;
  const ForkGuard fork_;
  mutable std::mutex mutex_;  // guards the members below
  std::array<Entry, kRecordedOperations> recent_;
  uint64_t entered_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace hbm::process_group
