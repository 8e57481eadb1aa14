// A collective as a sequence of ticks (communicator/shm/shm_group.h): it publishes its first slot when it begins,
// and whenever every member has published the last one, step() uses what they show and publishes
// the next, until there is none.
//
// Threads: one at a time, as Operation.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/message.h"
#include "progress/operation.h"
#include "communicator/shm/shm_group.h"

namespace hbm::node {

// From here on a stream that lies in its owner's segment is used there and not copied to a slot: it
// costs one tick more.
inline constexpr size_t kDirectBytes = 16 * 1024;

// What one poll() copies or reduces at most, of each source, before an abort is looked for.
inline constexpr size_t kBytesAPoll = size_t{16} << 20;

class Step : public Operation {
 public:
  Progress poll() final;
  bool doze(std::chrono::steady_clock::time_point until) final;
  std::vector<int> missing() const final { return team_->missing(); }
  std::string describe() const final;
  void abandon() noexcept override {}

 protected:
  // `count`: elements, as errors report them.
  Step(std::shared_ptr<Team> team, const Signature& signature, size_t count)
      : team_(std::move(team)), signature_(signature), count_(count) {}

  // Uses the slots of this tick. Publishes the next and returns kActive, or returns kDone. (It may
  // return kActive without publishing: it is called again.)
  virtual Progress step() = 0;

  // The next slot, with its header filled in. `part` counts the operation's ticks.
  Slot& open();

  // Throws Error(kMismatch) if a member is not in this operation. `same_count`: the count must be
  // the same on all. An error tells the true counts in any case.
  void check(bool same_count) const;
  // Throws unless member `index` sends this rank as many elements as it takes.
  void check_stream(size_t index, size_t found, size_t expected) const;

  size_t element() const { return element_size(signature_.dtype); }

  const std::shared_ptr<Team> team_;
  const Signature signature_;
  const size_t count_;

 private:
  uint32_t part_ = 0;
};

}  // namespace hbm::node
