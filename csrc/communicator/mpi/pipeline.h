// The base classes of the operations over MPI. GroupOperation has their channel, their signature
// and their description in errors. Pipeline and TwoPhase are the two shapes of the collectives. A
// derived class implements the messages that a collective sends, and the use of the messages that
// it receives.
//
// Both shapes keep several rounds or blocks in flight (window.h). All ranks post the same rounds in
// the same order, and a round depends only on earlier rounds. So, by induction, no rank waits
// forever if all ranks run the operation.
//
// Every message is staged (round.h), so an operation that moves data counts as staged.
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/round.h"
#include "communicator/mpi/tuning.h"
#include "progress/operation.h"

namespace hbm::communicator::mpi {

class GroupOperation : public progress::Operation {
 public:
  GroupOperation(std::shared_ptr<Channel> channel, const Signature& signature, size_t count)
      : channel_(std::move(channel)), signature_(signature), count_(count) {}

  std::string describe() const override {
    return communicator::describe(make_header(signature_, count_, 0, 0),
                                  channel_->group_rank(channel_->rank), channel_->group);
  }

 protected:
  size_t size() const { return static_cast<size_t>(channel_->size); }
  size_t rank() const { return static_cast<size_t>(channel_->rank); }
  size_t element() const { return element_size(signature_.operands()); }

  // Returns the other ranks, starting after this rank, so that not all ranks write to rank 0 first.
  std::vector<int> peers() const {
    std::vector<int> others;
    for (int step = 1; step < channel_->size; ++step) {
      others.push_back((channel_->rank + step) % channel_->size);
    }
    return others;
  }

  const std::shared_ptr<Channel> channel_;
  const Signature signature_;
  const size_t count_;  // the elements that errors report
};

// The rounds of an operation. The rounds in flight are in the order in which they were opened.
class Rounds {
 public:
  // Allocates `count` rounds of a size, as Round().
  Rounds(std::shared_ptr<Channel> channel, size_t sends, size_t receives, size_t payload_bytes,
         size_t count);

  // Returns true if another round can be opened.
  bool ready() const { return !idle_.empty(); }
  // Opens a round, as Round::open(), and returns it. Allocates another one if more than these may
  // be in flight (window.h). REQUIRES: ready()
  Round& open(const Signature& signature, size_t part, int tag_phase);

  bool empty() const { return in_flight_.empty(); }
  Round& front() { return in_flight_.front(); }
  const Round& front() const { return in_flight_.front(); }
  // Takes the first round, which is done, out of flight.
  void pop();

  void abandon() noexcept;

 private:
  void grow();

  const std::shared_ptr<Channel> channel_;
  const size_t sends_;
  const size_t receives_;
  const size_t payload_bytes_;
  std::list<Round> in_flight_;
  std::list<Round> idle_;
};

// A collective whose data is cut into parts, with one round for each part. Parts are numbered from
// 0.
class Pipeline : public GroupOperation {
 public:
  void begin() override;
  progress::Progress poll() override;
  std::vector<int> missing() const override;
  std::vector<int> needed() const override;
  void abandon() noexcept override;

 protected:
  using GroupOperation::GroupOperation;

  // Allocates the first rounds. `sends`, `receives`: the most messages of this rank in a round.
  // `payload_bytes`: of the longest message. REQUIRES: called in the constructor.
  void prepare(size_t parts, size_t sends, size_t receives, size_t payload_bytes);

  // Posts the messages of `part` in a round that has been opened for it.
  virtual void post(Round& round, size_t part) = 0;
  // Uses the payloads of `part`.
  virtual void deliver(const Round& round, size_t part) = 0;

  size_t parts() const { return parts_; }
  size_t posted() const { return posted_; }  // parts whose messages are posted

 private:
  // Posts the next parts, as many as rounds are ready.
  void fill();

  size_t parts_ = 0;
  size_t next_ = 0;  // the next part to complete
  size_t posted_ = 0;
  std::optional<Rounds> rounds_;  // absent until prepare()
};

// A collective that moves its data block by block. Each block takes two phases, and each phase is
// one round. In the first phase the ranks send each owner its shard of the block. In the second
// phase the owners send their shards on. The owners are some or all ranks.
class TwoPhase : public GroupOperation {
 public:
  void begin() override;
  progress::Progress poll() override;
  std::vector<int> missing() const override;
  std::vector<int> needed() const override;
  void abandon() noexcept override;
  bool self_sufficient() const override { return false; }

 protected:
  struct Room {
    size_t sends;
    size_t receives;
  };

  // Moves `count` elements; errors and headers have `reported`. A block has a chunk for each of the
  // `owners`. `first`, `second`: the most messages that this rank sends and receives in a round of
  // the first and of the second phase.
  TwoPhase(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
           size_t reported, std::vector<int> owners, Room first, Room second);

  bool owns() const { return owns(channel_->rank); }
  const std::vector<int>& owners() const { return owners_; }
  // Returns the owners except this rank, starting after this rank.
  std::vector<int> other_owners() const;

  // Returns the part of `block` that rank `owner` owns. The first shards may have one element more.
  ElementRange shard(size_t block, int owner) const;

  virtual void post_first(Round& round, size_t block) = 0;
  // Returns the `tag_phase` of Round::open() for the messages of the first phase. In a chain it is
  // 1, because the previous rank sends these messages in its own second phase. On the root of a
  // chain and on the rank after the root it is 0.
  virtual int first_phase() const { return 0; }
  // Posts the second phase. `first` has the payloads of the first phase of the block.
  virtual void post_second(Round& round, const Round& first, size_t block) = 0;
  virtual void deliver(const Round& second, size_t block) = 0;

 private:
  bool owns(int rank) const;
  size_t longest_shard() const;  // elements

  bool awaits_first() const { return passed_ < opened_ && second_.ready(); }
  bool awaits_second() const { return finished_ < passed_; }
  // Opens the first phase of the next blocks, as many as rounds are ready.
  void fill();
  bool poll_first(progress::Progress& progress);
  bool poll_second(progress::Progress& progress);

  const size_t elements_;
  const std::vector<int> owners_;  // ascending
  const size_t block_;             // elements
  const size_t blocks_;
  size_t opened_ = 0;    // blocks whose first phase has begun
  size_t passed_ = 0;    // blocks whose first phase is complete
  size_t finished_ = 0;  // blocks whose second phase is complete
  Rounds first_;
  Rounds second_;
};

}  // namespace hbm::communicator::mpi
