// The Work that c10d sees: a ticket of the queue, with its tensors, its future and its profiler
// range.
//
// Threads: as c10d::Work, from any. Whoever waits may carry the operation itself
// (progress/operation_queue.h).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "process_group/device_transfer.h"
#include "process_group/operations.h"
#include "progress/operation_queue.h"

namespace hbm {

// Returns the title of an operation's profiler range: Gloo's in a group whose backend calls itself
// "gloo". Null if no profiler records: a range costs allocations.
const char* range_title(const std::string& backend, const OperationKind& kind);

class WorkHbm final : public c10d::Work {
 public:
  // `title` names the profiler range; null for none. `on_device` is what the operation leaves on an
  // accelerator; null for tensors on the host.
  WorkHbm(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
          std::vector<at::Tensor> outputs, std::shared_ptr<OperationQueue> queue,
          std::shared_ptr<const DeviceResult> on_device);

  // Binds the work to its ticket, or to an operation that has succeeded already (no ticket). Called
  // once, before anyone else sees the work.
  void bind(std::shared_ptr<Ticket> ticket, uint64_t sequence);

  // Ends the profiler range. Called by whoever completes the operation.
  std::function<void()> end_of_range() { return recordFunctionEndCallback_; }

  // Set once a receive from any rank is done.
  std::shared_ptr<int> source_slot() { return source_; }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return *source_; }
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }

  // Makes the current stream wait for results on a device, once they are queued; nothing without
  // them. REQUIRES: the operation is done.
  void block_current_stream() const;

  // Throws the operation's error. On a timeout of this call alone (the operation goes on) throws
  // DistBackendError. Blocks the host until the results are there or, on a device, queued; then
  // block_current_stream().
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool done() const { return !ticket_ || ticket_->done(); }

  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<OperationQueue> queue_;
  const std::shared_ptr<const DeviceResult> on_device_;
  const std::shared_ptr<int> source_ = std::make_shared<int>(-1);
  std::shared_ptr<Ticket> ticket_;  // null: done
  uint64_t sequence_ = 0;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by future_mutex_; made when asked for
};

// Begins a profiler range for a coalesced operation on `inputs`, one part for each. The function
// that is returned is never empty; each part calls it at its end, and the last to do so ends the
// range. Without a title there is no range.
std::function<void()> range_of_parts(const char* title, const std::vector<at::Tensor>& inputs);

// Several works as one: done when all are, failed with the first error of the list.
class WorkAll final : public c10d::Work {
 public:
  WorkAll(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace hbm
