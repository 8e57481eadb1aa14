// The base class of collectives over several nodes: a pipeline of three stages for each block.
// node_in(): the ranks of a node exchange or reduce in shared memory. inter_node(): the leaders of
// the nodes exchange or reduce over MPI. node_out(): the ranks of a node receive the results. A
// derived class implements the three stages.
//
// Order: a node takes its steps one at a time, in the same order on all its ranks. First comes
// node_in() of the first ahead() blocks. Then node_out() of one block alternates with node_in() of
// the next. So node_in() of a block begins after node_out() of the block ahead() before it, and may
// use that block's scratch memory. The inter-node stage takes blocks in order, most_in_flight() at
// a time. A stage of a block waits only for earlier stages of the block and for
// blocks before it, and all ranks have the same blocks. So, by induction, no rank waits forever if
// all ranks run the operation.
//
// The operation's Observation names late ranks of this node alone, because the ranks of a node have
// one clock. It names them only if the first step of the node is node_in().
//
// Threads: one thread at a time, as for Operation.
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

namespace hbm::communicator::hierarchical {

class LeaderOperation : public progress::Operation {
 public:
  void begin() override {}
  progress::Progress poll() final;
  progress::Slept sleep(std::chrono::steady_clock::time_point until, bool polled) final;
  std::string describe() const final;
  std::vector<int> missing() const final { return ranks_of_stages(&progress::Operation::missing); }
  std::vector<int> needed() const final;
  void abandon() noexcept final;
  bool peers_may_write() const final { return in_node_ && in_node_->peers_may_write(); }
  bool self_sufficient() const final { return false; }

 protected:
  // `count`: the elements that errors report.
  LeaderOperation(std::shared_ptr<const NodeLayout> layout, const Signature& signature,
                  size_t count)
      : layout_(std::move(layout)), signature_(signature), count_(count) {}

  // `staging_bytes`: of the messages of a block, on a leader. `scratch_bytes`: that a leader needs
  // for a block from node_in() to node_out(). All ranks give the same values. REQUIRES: called in
  // the constructor.
  void set_blocks(size_t blocks, size_t staging_bytes, size_t scratch_bytes = 0);
  // Returns the blocks that complete node_in() before node_out() of the first block begins.
  size_t ahead() const { return ahead_; }
  // Logs the leaders and blocks at the debug level.
  void log_cut(size_t leaders, size_t block_bytes) const;

  // Return the operation of a stage of `block`; null if this rank has no work in the stage.
  // node_in() and node_out() return null only if no rank of the node has work in the stage.
  virtual OperationPtr node_in(size_t block) = 0;
  virtual OperationPtr inter_node(size_t block) = 0;
  virtual OperationPtr node_out(size_t block) = 0;

  // Returns true if inter_node() of a block begins only after node_in() of that block.
  virtual bool inter_node_follows_node() const { return true; }
  // Returns the group ranks for which inter_node() will wait in block `first` and in later blocks.
  // REQUIRES: none of these blocks has begun inter_node().
  virtual std::vector<int> inter_node_peers(size_t first) const;

  // Returns the most blocks in the inter-node stage at a time; at most kTagRanges.
  virtual size_t most_in_flight() const;

  size_t element() const { return element_size(signature_.dtype); }
  // Returns the channel of this rank's rail in the tag range of `block`. REQUIRES: this rank is a
  // leader.
  const std::shared_ptr<mpi::Channel>& channel_of(size_t block) const {
    return layout_->rail[block % mpi::kTagRanges];
  }

  const std::shared_ptr<const NodeLayout> layout_;
  const Signature signature_;
  const size_t count_;

 private:
  std::vector<int> ranks_of_stages(std::vector<int> (progress::Operation::*list)() const) const;
  bool poll_inter_node();
  bool poll_node();
  void check_node();
  bool inter_node_in_flight() const { return started_ > crossed_; }

  // The steps of the node are numbered in their order, two for each block. goes_in(): true if the
  // step is node_in() of its block, false if it is node_out().
  bool goes_in(size_t step) const;
  size_t block_of(size_t step) const;

  size_t blocks_ = 1;
  size_t ahead_ = 1;
  size_t staging_bytes_ = 0;
  size_t step_ = 0;     // the next step of the node
  size_t entered_ = 0;  // blocks whose node_in() is done
  size_t started_ = 0;  // blocks whose inter_node() has begun
  size_t crossed_ = 0;  // all blocks before this one have completed inter_node()
  OperationPtr in_node_;
  std::array<OperationPtr, mpi::kTagRanges> in_flight_;  // by block % kTagRanges; null: done
  shm::Clock::time_point checked_at_{};  // when check_node() last checked for deaths
};

}  // namespace hbm::communicator::hierarchical
