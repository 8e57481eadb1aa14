// The implementation of c10d::Work: a request of the queue, with its tensors, its future and its
// profiler range.
//
// Threads: any, as for c10d::Work. A thread that waits may drive the operation itself
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

namespace hbm::process_group {

// Returns the title of an operation's profiler range, which begins with the name of the group's
// backend. For "gloo" it is the title that Gloo has. Returns null if no profiler records, because a
// range costs allocations.
const char* range_title(const std::string& backend, const OperationKind& kind);

class WorkHbm final : public c10d::Work {
 public:
  // `title` names the profiler range; null: none. `on_device` is the operation's result on an
  // accelerator; null for tensors on the host.
  WorkHbm(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
          std::vector<at::Tensor> outputs, std::shared_ptr<progress::OperationQueue> queue,
          std::shared_ptr<const DeviceResult> on_device);

  // Binds the work to its request, or to an operation that has succeeded already (no request).
  // Called once, before another thread sees the work.
  void bind(std::shared_ptr<progress::Request> request, uint64_t sequence);

  // Returns a function that ends the profiler range. The thread that completes the operation calls
  // it.
  std::function<void()> end_of_range() { return recordFunctionEndCallback_; }

  // Names the work's operation in the profile (process_group/profile.h). Called before bind().
  void profile(uint64_t number) { profiled_ = number; }

  // Returns the variable in which a receive stores the sender's rank when it is done; -1 before.
  std::shared_ptr<int> source() { return source_; }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return *source_; }
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }

  // Makes the current stream wait for results on a device, once they are queued. Does nothing
  // without such results. REQUIRES: the operation is done.
  void block_current_stream() const;

  // Blocks the host until the operation is done, so that results on a device are queued; then calls
  // block_current_stream(). Throws the operation's error. If only this call times out, throws
  // DistBackendError, and the operation continues.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool done() const { return !request_ || request_->done(); }

  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<progress::OperationQueue> queue_;
  const std::shared_ptr<const DeviceResult> on_device_;
  const std::shared_ptr<int> source_ = std::make_shared<int>(-1);
  std::shared_ptr<progress::Request> request_;  // null: done
  uint64_t sequence_ = 0;
  uint64_t profiled_ = 0;  // its number in the profile; 0: none
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by future_mutex_; made on demand
};

// Begins a profiler range for a coalesced operation on `inputs`, with one part for each input.
// Returns a function, never empty, that each part calls at its end; the last call ends the range.
// Without a title there is no range.
std::function<void()> range_of_parts(const char* title, const std::vector<at::Tensor>& inputs);

// Several works as one: done when all are done, failed with the first error in the list.
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

}  // namespace hbm::process_group
