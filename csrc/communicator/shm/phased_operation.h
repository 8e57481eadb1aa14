// A collective as a sequence of phases (communicator/shm/shm_group.h). It publishes its first slot
// in begin(). Once all ranks have published their slots of a phase, next_phase() reads these slots
// and publishes this rank's slot of the next phase. This repeats until the collective is done.
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "communicator/message.h"
#include "communicator/shm/shm_group.h"
#include "communicator/shm/tuning.h"
#include "progress/operation.h"

namespace hbm::communicator::shm {

class PhasedOperation : public progress::Operation {
 public:
  progress::Progress poll() final;
  progress::Slept sleep(std::chrono::steady_clock::time_point until, bool polled) final;
  std::vector<int> missing() const final { return shm_group_->missing(); }
  std::string describe() const final;
  void abandon() noexcept override {}

 protected:
  // `count`: the elements that errors report.
  PhasedOperation(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count)
      : shm_group_(std::move(shm_group)), signature_(signature), count_(count) {}

  // Uses the slots of this phase. Publishes the next slot and returns kActive, or returns kDone if
  // the collective is done. If it returns kActive or kIdle without publishing, poll() calls it
  // again for the same phase.
  virtual progress::Progress next_phase() = 0;

  // Does a part of the work that needs no other rank; returns false if none is left. Called while
  // some rank has not published.
  virtual bool meanwhile() { return false; }

  // Returns the next slot, with its header filled in. The header counts the phases of the
  // operation.
  Slot& open();

  // Throws Error(kMismatch) if a rank is in another operation. `same_count`: true if the count must
  // be the same on all ranks. The error reports the true counts even if `same_count` is false.
  void check(bool same_count) const;
  // Throws unless local rank `index` sends as many elements as this rank expects.
  void check_transfer(size_t index, size_t found, size_t expected) const;

  size_t element() const { return element_size(signature_.operands()); }

  const std::shared_ptr<ShmGroup> shm_group_;
  const Signature signature_;
  const size_t count_;

 private:
  void note_last_rank();
  void require_alive();

  uint32_t ends_seen_ = shm_group_->ends();
  std::chrono::milliseconds check_pause_ = kFirstPeerCheck;  // doubles with each check of a wait
  uint32_t part_ = 0;
  int64_t began_ = 0;  // as in the slot; 0 after note_last_rank()
};

}  // namespace hbm::communicator::shm
