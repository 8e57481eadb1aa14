// A collective of several nodes as a pipeline of three stages, block by block: the ranks of a node
// exchange or reduce in the memory that they share (node_in), the leaders of the nodes exchange
// over MPI (link), and the ranks of a node take what came (node_out). What remains of a collective
// is what it does in each stage.
//
// The order. A node takes its steps one at a time, in the same order on all its members: node_in of
// the first kBlocksAhead blocks, then node_out of a block and node_in of the next in turn. So
// node_in of a block begins after node_out of the one kBlocksAhead before it, whose scratch memory
// it may use. The link takes blocks in order, most_on_link() at a time. A stage of a block waits
// for earlier stages of that block and of the blocks before it alone, and all ranks have the same
// blocks: by induction none waits for ever for a rank that takes part.
//
// Threads: as Operation.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/hierarchical/node_layout.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/message.h"
#include "communicator/mpi/tuning.h"

namespace hbm::hierarchical {

class LeaderOperation : public Operation {
 public:
  void begin() override {}
  Progress poll() final;
  Slept sleep(std::chrono::steady_clock::time_point until, bool polled) final;
  std::string describe() const final;
  std::vector<int> missing() const final { return ranks_of_stages(&Operation::missing); }
  std::vector<int> needed() const final;
  void abandon() noexcept final;
  bool peers_may_write() const final { return in_node_ && in_node_->peers_may_write(); }
  bool self_sufficient() const final { return false; }

 protected:
  // `count`: elements, as errors report them.
  LeaderOperation(std::shared_ptr<const NodeLayout> layout, const Signature& signature,
                  size_t count)
      : layout_(std::move(layout)), signature_(signature), count_(count) {}

  // To be called by the constructor.
  void set_blocks(size_t blocks) { blocks_ = blocks; }
  // Logs what was chosen, if HBMCOMM_LOG asks for it.
  void tell(size_t leaders, size_t block_bytes) const;

  // A stage of a block: null if this rank has nothing to do in it (for the node's stages: if no
  // member of the node has).
  virtual OperationPtr node_in(size_t block) = 0;
  virtual OperationPtr link(size_t block) = 0;
  virtual OperationPtr node_out(size_t block) = 0;

  // False: this rank's link() needs nothing of node_in().
  virtual bool link_follows_node() const { return true; }
  // The ranks of the group that link() of `first` and later blocks, not begun yet, waits for.
  virtual std::vector<int> linked_from(size_t first) const;

  // The blocks that may be on the link at a time: kLanes at most.
  virtual size_t most_on_link() const { return mpi::kLanes; }

  size_t element() const { return element_size(signature_.dtype); }
  // The channel of block `block`.
  const std::shared_ptr<mpi::Channel>& lane(size_t block) const {
    return layout_->column[block % mpi::kLanes];
  }

  const std::shared_ptr<const NodeLayout> layout_;
  const Signature signature_;
  const size_t count_;

 private:
  std::vector<int> ranks_of_stages(std::vector<int> (Operation::*list)() const) const;
  bool poll_link();
  bool poll_node();
  void look_after_node();
  bool on_link() const { return started_ > crossed_; }

  // The node's steps, 2 for each block.
  bool goes_in(size_t step) const;
  size_t block_of(size_t step) const;
  size_t ahead() const { return std::min(kBlocksAhead, blocks_); }

  size_t blocks_ = 1;
  size_t step_ = 0;     // of the node
  size_t entered_ = 0;  // blocks whose node_in() is done
  size_t started_ = 0;  // blocks whose link() has begun
  size_t crossed_ = 0;  // blocks whose link() is done, and that of those before
  OperationPtr in_node_;
  std::array<OperationPtr, mpi::kLanes> on_link_;  // by block % kLanes; null: done
  shm::Clock::time_point looked_at_{};             // for deaths on this node
};

}  // namespace hbm::hierarchical
