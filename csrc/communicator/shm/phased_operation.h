// A collective as a sequence of phases (communicator/shm/shm_group.h): it publishes its first slot
// when it begins, and whenever every member has published the last one, next_phase() uses what they
// show and publishes the next, until there is none.
//
// Threads: one at a time, as Operation.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/message.h"
#include "communicator/shm/shm_group.h"
#include "communicator/shm/tuning.h"
#include "progress/operation.h"

namespace hbm::shm {

class PhasedOperation : public Operation {
 public:
  Progress poll() final;
  Slept sleep(std::chrono::steady_clock::time_point until, bool polled) final;
  std::vector<int> missing() const final { return shm_group_->missing(); }
  std::string describe() const final;
  void abandon() noexcept override {}

 protected:
  // `count`: elements, as errors report them.
  PhasedOperation(std::shared_ptr<ShmGroup> shm_group, const Signature& signature, size_t count)
      : shm_group_(std::move(shm_group)), signature_(signature), count_(count) {}

  // Uses the slots of this phase. Publishes the next and returns kActive, or returns kDone. (It may
  // return kActive without publishing: it is called again.)
  virtual Progress next_phase() = 0;

  // Does a piece of what needs no other member; false if nothing is left. Called while they have
  // not all published.
  virtual bool meanwhile() { return false; }

  // The next slot, with its header filled in. `part` counts the operation's phases.
  Slot& open();

  // Throws Error(kMismatch) if a member is not in this operation. `same_count`: the count must be
  // the same on all. An error tells the true counts in any case.
  void check(bool same_count) const;
  // Throws unless member `index` sends this rank as many elements as it takes.
  void check_stream(size_t index, size_t found, size_t expected) const;

  size_t element() const { return element_size(signature_.operands()); }

  const std::shared_ptr<ShmGroup> shm_group_;
  const Signature signature_;
  const size_t count_;

 private:
  uint32_t part_ = 0;
};

}  // namespace hbm::shm
