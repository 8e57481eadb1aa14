// Batches: the calls of one thread between startCoalescing() and endCoalescing(), usually the
// messages of a batch_isend_irecv.
//
// All messages are checked first, and begin at the end of the batch. If a check refuses a call,
// endCoalescing() raises the error of the first such call, and begins no message. The refused call
// itself does not raise, because PyTorch's _coalescing_manager keeps its state if its body raises.
// Later collectives would then return without calling the backend.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "process_group/work.h"

namespace hbm::process_group {

// A message that begins at the end of its batch, or a call that was refused.
//
// Threads: any, as for c10d::Work.
class BatchedWork final : public c10d::Work {
 public:
  // `begin` begins the message of `work`. It is called at most once: at the end of the batch, or by
  // an earlier wait(), result() or getFuture().
  BatchedWork(c10::intrusive_ptr<WorkHbm> work, int rank, c10d::OpType type,
              std::function<void()> begin);
  BatchedWork(int rank, const std::exception_ptr& refusal);

  // Begins the message unless it has begun. Throws the error of `begin`, or the refusal.
  void begin();
  // Makes the message fail with `refusal`, unless it has begun.
  void refuse(const std::exception_ptr& refusal);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  enum class State { kHeld, kBegun, kRefused };
  bool begun() const { return state_.load(std::memory_order_acquire) == State::kBegun; }
  bool refused() const { return state_.load(std::memory_order_acquire) == State::kRefused; }

  const c10::intrusive_ptr<WorkHbm> work_;  // null for a refused call
  std::mutex mutex_;  // held while `begin_` runs, and by refuse(); queries do not take it
  std::function<void()> begin_;  // guarded by mutex_
  std::exception_ptr refusal_;   // written before the state becomes kRefused
  // begin() and refuse() store the state last (release); the queries load it first (acquire).
  std::atomic<State> state_;
};

struct CoalescedBatch {
  std::vector<c10::intrusive_ptr<c10d::Work>> collectives;  // begun when issued
  std::vector<c10::intrusive_ptr<BatchedWork>> messages;
  std::exception_ptr refusal;  // of the first call that was refused
};

}  // namespace hbm::process_group
