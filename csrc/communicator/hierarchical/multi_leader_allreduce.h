// allreduce over several nodes: reduced within each node, block by block, so that each of its
// leaders has a shard of the block; reduced across nodes by the leaders of one place, over MPI;
// handed out within each node. While one block is with MPI, the node works on the next.
//
// The result lies in `data` at every stage. Source: MVAPICH2's multi-leader design
// (docs/design/hierarchical.md).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/hierarchical/node_layout.h"
#include "communicator/message.h"

namespace hbm::hierarchical {

class MultiLeaderAllreduce final : public Operation {
 public:
  // `data`: `count` elements, reduced in place.
  MultiLeaderAllreduce(std::shared_ptr<const NodeLayout> layout, const Signature& signature,
                       void* data, size_t count);

  // False for means of types whose sum may overflow: the nodes' sums would have to be held in them.
  // (Sums of halves are supported, and rounded once in each stage.)
  static bool supports(Dtype dtype, ReduceOp op) noexcept;

  void begin() override {}
  Progress poll() override;
  bool wait(std::chrono::steady_clock::time_point until) override;
  std::string describe() const override;
  std::vector<int> missing() const override;
  void abandon() noexcept override;
  bool self_sufficient() const override { return false; }

 private:
  bool poll_column();
  bool poll_node();
  OperationPtr reduce_to_leaders(size_t block) const;
  OperationPtr hand_out(size_t block) const;

  // The order of the ShmGroup's steps, 2 for each block: reduce 0, reduce 1, hand out 0, reduce 2,
  // hand out 1, ...
  bool reduces(size_t step) const { return step == 0 || (step % 2 == 1 && step < 2 * blocks_ - 1); }
  size_t block_of(size_t step) const;

  bool leads() const { return layout_->shm_group->self() < leaders_; }
  ElementRange block(size_t index) const;
  ElementRange shard(size_t block, size_t leader) const;
  std::byte* at(size_t index) const { return data_ + index * element_size(signature_.dtype); }

  const std::shared_ptr<const NodeLayout> layout_;
  const Signature signature_;
  std::byte* const data_;
  const size_t count_;
  const size_t leaders_;  // that this operation uses
  const size_t block_;    // elements
  const size_t blocks_;
  size_t step_ = 0;     // of the node
  size_t reduced_ = 0;  // blocks that the node has reduced
  size_t crossed_ = 0;  // blocks that came back from the column
  OperationPtr in_node_;
  OperationPtr in_column_;
  shm::Clock::time_point looked_at_{};  // for deaths on this node
};

}  // namespace hbm::hierarchical
