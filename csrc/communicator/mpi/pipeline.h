// The base classes of the operations over MPI. GroupOperation is what all share: their channel,
// their signature and their name in errors. Pipeline and TwoPhase are the two shapes that the
// collectives have: what remains of a collective is what it sends and what it does with what came.
//
// Both shapes keep two rounds (or blocks) in flight, so that copying one overlaps with the flight
// of the other. Rank r posts the same rounds in the same order as every other rank, and a round
// depends on earlier rounds only: by induction none waits for ever for a rank that takes part.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/round.h"
#include "communicator/mpi/tuning.h"
#include "progress/operation.h"

namespace hbm::mpi {

class GroupOperation : public Operation {
 public:
  GroupOperation(std::shared_ptr<Channel> channel, const Signature& signature, size_t count)
      : channel_(std::move(channel)), signature_(signature), count_(count) {}

  std::string describe() const override {
    return hbm::describe(make_header(signature_, count_, 0, 0),
                         channel_->group_rank(channel_->rank), channel_->group);
  }

 protected:
  size_t size() const { return static_cast<size_t>(channel_->size); }
  size_t rank() const { return static_cast<size_t>(channel_->rank); }
  size_t element() const { return element_size(signature_.operands()); }

  // The other ranks, the next one first, so that not all ranks write to rank 0 at once.
  std::vector<int> peers() const {
    std::vector<int> others;
    for (int step = 1; step < channel_->size; ++step) {
      others.push_back((channel_->rank + step) % channel_->size);
    }
    return others;
  }

  const std::shared_ptr<Channel> channel_;
  const Signature signature_;
  const size_t count_;  // elements, as errors report it
};

// Rounds of one kind: part 0, 1, ... parts - 1.
class Pipeline : public GroupOperation {
 public:
  void begin() override;
  Progress poll() override;
  std::vector<int> missing() const override { return rounds_[next_ % 2].missing(); }
  std::vector<int> needed() const override { return rounds_[next_ % 2].needed(); }
  void abandon() noexcept override;

 protected:
  using GroupOperation::GroupOperation;

  // Called by the constructor. The slot sizes are in bytes.
  void prepare(size_t parts, size_t sends, size_t receives, size_t slot_bytes);

  // Posts the messages of `part`, into a round that was opened for it.
  virtual void post(Round& round, size_t part) = 0;
  // Uses the payloads of `part`.
  virtual void deliver(const Round& round, size_t part) = 0;

  size_t parts() const { return parts_; }
  size_t posted() const { return std::min(parts_, next_ + 2); }  // parts whose messages are

 private:
  void open(size_t part);

  size_t parts_ = 0;
  size_t next_ = 0;  // the part to complete next
  std::vector<Round> rounds_;
};

// Blocks that each go through two rounds: the ranks first fill the owners of the block's shards,
// then the owners pass their shards on. Owners are all ranks, or some.
class TwoPhase : public GroupOperation {
 public:
  void begin() override;
  Progress poll() override;
  std::vector<int> missing() const override;
  std::vector<int> needed() const override;
  void abandon() noexcept override;
  bool self_sufficient() const override { return false; }

 protected:
  struct Room {
    size_t sends;
    size_t receives;
  };

  // `count` elements, of which errors and headers speak as `told`. A block has a chunk for each of
  // the `owners`.
  TwoPhase(std::shared_ptr<Channel> channel, const Signature& signature, size_t count, size_t told,
           std::vector<int> owners, Room first, Room second);

  bool owns() const { return owns(channel_->rank); }
  const std::vector<int>& owners() const { return owners_; }
  // The owners but this rank, the next one first.
  std::vector<int> other_owners() const;

  // The part of `block` that `owner`, a rank, passes on; the first shards may have one element
  // more.
  ElementRange shard(size_t block, int owner) const;

  virtual void post_first(Round& round, size_t block) = 0;
  // The phase that the messages of post_first() have on the wire.
  virtual int first_phase() const { return 0; }
  // `first` holds the payloads of the block's first phase.
  virtual void post_second(Round& round, const Round& first, size_t block) = 0;
  virtual void deliver(const Round& second, size_t block) = 0;

 private:
  bool owns(int rank) const;

  // A round that the block before the last one still uses is not free for the next.
  bool awaits_first() const { return passed_ < blocks_ && passed_ - finished_ < 2; }
  bool awaits_second() const { return finished_ < passed_; }
  void open_first(size_t block);
  bool poll_first(Progress& progress);
  bool poll_second(Progress& progress);

  const size_t elements_;
  const std::vector<int> owners_;  // ascending
  const size_t block_;             // elements
  const size_t blocks_;
  size_t passed_ = 0;    // blocks whose first phase is complete
  size_t finished_ = 0;  // blocks whose second phase is complete
  std::vector<Round> first_;
  std::vector<Round> second_;
};

}  // namespace hbm::mpi
