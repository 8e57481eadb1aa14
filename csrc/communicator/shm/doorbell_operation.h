// An operation within a node that uses no phases: a message, or an operation of a window. It sleeps
// on the rank's doorbell for messages. poll() checks whether the ranks that it waits for live.
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "communicator/shm/shm_group.h"
#include "communicator/shm/tuning.h"
#include "progress/operation.h"

namespace hbm::communicator::shm {

class DoorbellOperation : public progress::Operation {
 public:
  progress::Progress poll() final;
  progress::Slept sleep(std::chrono::steady_clock::time_point until, bool polled) final;

 protected:
  explicit DoorbellOperation(std::shared_ptr<ShmGroup> shm_group)
      : shm_group_(std::move(shm_group)) {}

  // Advances as poll() does. If it returns kIdle, poll() checks the ranks in missing(). Progress of
  // another rank that matters to the operation must ring this rank's doorbell.
  virtual progress::Progress advance() = 0;

  ShmGroup& shm_group() const { return *shm_group_; }
  int rank_of(size_t local_rank) const { return shm_group_->local_rank(local_rank).group_rank; }

 private:
  void check_peers();

  const std::shared_ptr<ShmGroup> shm_group_;
  uint32_t seen_ = 0;
  uint32_t ends_seen_ = shm_group_->ends();
  std::chrono::milliseconds check_pause_ = kFirstPeerCheck;  // doubles with each check of a wait
  Clock::time_point check_due_ = Clock::now() + check_pause_;
};

}  // namespace hbm::communicator::shm
