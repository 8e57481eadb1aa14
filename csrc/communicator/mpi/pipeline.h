// The two shapes that the collectives have, as base classes: what remains of a collective is what
// it sends and what it does with what came.
//
// Both keep two rounds (or blocks) in flight, so that copying one overlaps with the flight of the
// other. Rank r posts the same rounds in the same order as every other rank, and a round depends on
// earlier rounds only: by induction none waits for ever for a rank that takes part.
#pragma once

#include <cstddef>
#include <vector>

#include "communicator/mpi/group_operation.h"
#include "communicator/mpi/round.h"

namespace hbm::mpi {

// Rounds of one kind: part 0, 1, ... parts - 1.
class Pipeline : public GroupOperation {
 public:
  void begin() override;
  Progress poll() override;
  std::vector<int> missing() const override { return rounds_[next_ % 2].missing(); }
  void abandon() noexcept override;

 protected:
  using GroupOperation::GroupOperation;

  // To be called by the constructor. The slot sizes are in bytes.
  void prepare(size_t parts, size_t sends, size_t receives, size_t slot_bytes);

  // Posts the messages of `part`, into a round that was opened for it.
  virtual void post(Round& round, size_t part) = 0;
  // Uses the payloads of `part`.
  virtual void deliver(const Round& round, size_t part) = 0;

  size_t parts() const { return parts_; }

 private:
  void open(size_t part);

  size_t parts_ = 0;
  size_t next_ = 0;  // the part to complete next
  std::vector<Round> rounds_;
};

// Blocks that each go through two rounds: the ranks first fill the owners of the block's shards,
// then the owners pass their shards on.
class TwoPhase : public GroupOperation {
 public:
  void begin() override;
  Progress poll() override;
  std::vector<int> missing() const override;
  void abandon() noexcept override;
  bool self_sufficient() const override { return false; }

 protected:
  struct Room {
    size_t sends;
    size_t receives;
  };
  struct Range {
    size_t offset;  // elements
    size_t count;
  };

  // A block has a chunk for each rank.
  TwoPhase(std::shared_ptr<Channel> channel, const Signature& signature, size_t count, Room first,
           Room second);

  // The part of `block` that `owner` passes on; the first shards may have one element more.
  Range shard(size_t block, size_t owner) const;

  virtual void post_first(Round& round, size_t block) = 0;
  // `first` holds the payloads of the block's first phase.
  virtual void post_second(Round& round, const Round& first, size_t block) = 0;
  virtual void deliver(const Round& second, size_t block) = 0;

 private:
  // A round that the block before the last one still uses is not free for the next.
  bool awaits_first() const { return passed_ < blocks_ && passed_ - finished_ < 2; }
  bool awaits_second() const { return finished_ < passed_; }
  void open_first(size_t block);
  bool poll_first(Progress& progress);
  bool poll_second(Progress& progress);

  const size_t block_;  // elements
  const size_t blocks_;
  size_t passed_ = 0;    // blocks whose first phase is complete
  size_t finished_ = 0;  // blocks whose second phase is complete
  std::vector<Round> first_;
  std::vector<Round> second_;
};

}  // namespace hbm::mpi
