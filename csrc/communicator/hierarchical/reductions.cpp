// The collectives over several nodes that reduce. Each collective reduces an element in the order
// of the ranks of each node, then in the order of the nodes, so all collectives give the same bits.
// The partial result of a node has the tensor's type. In a mean of integers the partial result has
// a wider type, because the sums must be exact (kernels/partial_sum.h). A mean divides at the end.
// A mean of floating-point numbers below 32 bits, whose sum may overflow, divides the partial sum
// of each node before it is rounded. This also holds for complex numbers with such parts.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "communicator/hierarchical/communicator.h"
#include "communicator/hierarchical/cut.h"
#include "communicator/hierarchical/leader_operation.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/mpi/collectives.h"
#include "communicator/scatter_gather.h"
#include "communicator/shm/peer_transfers.h"
#include "communicator/shm/reduction.h"
#include "kernels/partial_sum.h"
#include "memory/staging.h"

namespace hbm::communicator::hierarchical {
namespace {

using shm::PeerExchange;

enum class Kind { kInteger, kNarrow, kWide };

Kind kind_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
    case Dtype::kFloat64:
    case Dtype::kComplex64:
    case Dtype::kComplex128:
      return Kind::kWide;
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
    case Dtype::kComplex32:
    case Dtype::kFloat8E5M2:
    case Dtype::kFloat8E4M3FN:
    case Dtype::kFloat8E5M2FNUZ:
    case Dtype::kFloat8E4M3FNUZ:
      return Kind::kNarrow;
    case Dtype::kBool:
    case Dtype::kUInt8:
    case Dtype::kInt8:
    case Dtype::kUInt16:
    case Dtype::kInt16:
    case Dtype::kUInt32:
    case Dtype::kInt32:
    case Dtype::kUInt64:
    case Dtype::kInt64:
    case Dtype::kUInt128:
    case Dtype::kInt128:
    case Dtype::kQuantized8:
    case Dtype::kQuantized32:
    case Dtype::kFloat8E8M0FNU:  // not reduced by AVG
    case Dtype::kFloat4E2M1X2:
      break;
  }
  return Kind::kInteger;
}

// The combining step of a node's stage, and of the inter-node stage.
struct Stages {
  Combining node;
  Combining inter_node;
};

// With one rank on each node only the inter-node stage reduces. So it computes the whole mean.
Stages stages_of(const NodeLayout& layout, Dtype dtype, ReduceOp op) {
  const size_t ranks = layout.ranks();
  if (op != ReduceOp::kAvg) return {{op, ranks}, {op, ranks}};
  if (kind_of(dtype) == Kind::kNarrow && !layout.one_each()) {
    return {{ReduceOp::kAvg, ranks}, {ReduceOp::kSum, ranks}};
  }
  return {{ReduceOp::kSum, ranks}, {ReduceOp::kAvg, ranks}};
}

// Returns `signature` with the type of partial results, for the stages before the mean is complete.
Signature of_partial_results(const NodeLayout& layout, Signature signature) {
  if (signature.reduce_op == ReduceOp::kAvg && !layout.one_each()) {
    signature.partial = kernels::partial_sum_type(signature.dtype, layout.most_local_ranks);
  }
  return signature;
}

// Scratch memory for `blocks` blocks of the pipeline. Block b reuses the memory of block b -
// `blocks`.
class Scratch {
 public:
  void acquire(memory::StagingPool& staging, size_t blocks, size_t block_bytes) {
    block_bytes_ = block_bytes;
    blocks_ = blocks;
    memory_ = staging.acquire(blocks * block_bytes);
  }
  std::byte* at(size_t block) const {
    return static_cast<std::byte*>(memory_.data()) + block % blocks_ * block_bytes_;
  }

 private:
  memory::StagingBuffer memory_;
  size_t block_bytes_ = 0;
  size_t blocks_ = 1;
};

// allreduce and reduce. node_in: the ranks of a node reduce a block, so that each leader has a
// shard. inter_node: the leaders of a rail reduce their shards. node_out: the leaders pass the
// results to their node, or to the root.
class LeaderReduction final : public LeaderOperation {
 public:
  LeaderReduction(std::shared_ptr<const NodeLayout> layout, const Signature& signature,
                  const void* in, void* out, size_t count)
      : LeaderOperation(std::move(layout), signature, count),
        in_{in, count},
        out_{out, count},
        partial_signature_(of_partial_results(*layout_, signature)),
        stages_(stages_of(*layout_, signature.dtype, signature.reduce_op)),
        leaders_(leaders_of(*layout_, count * element())) {
    const bool fine = to_root() && layout_->nodes.size() > 2;
    cut_ = cut(*layout_, count, operand(), 1, leaders_ * layout_->nodes.size(),
               fine ? kFine : kCoarse);
    const size_t longest = std::min(cut_.block, count);
    const size_t shard_bytes = shm::share_of(longest, element(), leaders_, 0).count * operand();
    const size_t nodes = layout_->nodes.size();
    // In the first phase a leader exchanges a message with each other node, and in the second phase
    // it sends one to all, and gets one from each.
    const size_t messages = 2 * (nodes - 1) + 1 + (nodes - 1);
    const bool scratch = (to_root() || widens()) && !layout_->one_each();
    set_blocks(cut_.blocks, messages * shard_bytes / nodes, scratch ? shard_bytes : 0);
    if (leads() && scratch) partial_.acquire(*layout_->staging, ahead(), shard_bytes);
    if (widens()) wide_.acquire(*layout_->staging, 1, longest * operand());
    log_cut(leaders_, cut_.block * element());
  }

 private:
  bool leads() const { return layout_->local_rank() < leaders_; }
  bool widens() const { return partial_signature_.partial.has_value(); }
  size_t operand() const { return element_size(partial_signature_.operands()); }
  bool to_root() const { return signature_.root >= 0; }
  int root_node() const {
    return to_root() ? static_cast<int>(layout_->node_of(signature_.root)) : -1;
  }

  ElementRange shard(size_t block, size_t leader) const {
    const ElementRange whole = cut_.range(count_, block);
    const ElementRange part = shard_of_block(block, leader);
    return {whole.offset + part.offset, part.count};
  }
  ElementRange shard_of_block(size_t block, size_t leader) const {
    return shm::share_of(cut_.range(count_, block).count, element(), leaders_, leader);
  }
  Sink result(size_t block, size_t leader) const {
    return part_of(out_, shard(block, leader), element());
  }
  // Return the addresses of this leader's shard of the node's result, and of the group's result.
  void* partial(size_t block) const {
    return to_root() || widens() ? partial_.at(block) : result(block, layout_->local_rank()).data;
  }
  void* reduced(size_t block) const {
    return to_root() ? partial_.at(block) : result(block, layout_->local_rank()).data;
  }
  // Returns this rank's input for a block, in the type of the operands.
  Source input(size_t block) const {
    const Source in = part_of(in_, cut_.range(count_, block), element());
    if (!widens()) return in;
    kernels::widen(wide_.at(0), *partial_signature_.partial, in.data, signature_.dtype, in.count);
    return {wide_.at(0), in.count};
  }

  OperationPtr node_in(size_t block) override {
    if (layout_->one_each()) return nullptr;
    const Source mine = input(block);
    std::vector<Source> inputs(layout_->local_size());
    for (size_t leader = 0; leader < leaders_; ++leader) {
      inputs[leader] = part_of(mine, shard_of_block(block, leader), operand());
    }
    return std::make_unique<shm::ShmReduceScatter>(layout_->shm_group, partial_signature_, count_,
                                                   inputs, leads() ? partial(block) : nullptr,
                                                   stages_.node);
  }

  OperationPtr inter_node(size_t block) override {
    if (!leads()) return nullptr;
    const ElementRange mine = shard(block, layout_->local_rank());
    mpi::Reduction reduction{nullptr, nullptr, mine.count, root_node(), stages_.inter_node, count_};
    if (layout_->one_each()) {
      reduction.in = part_of(in_, mine, element()).data;
      reduction.out = part_of(out_, mine, element()).data;
    } else {
      reduction.in = partial(block);
      reduction.out = reduced(block);
    }
    return mpi::make_reduction(channel_of(block), partial_signature_, reduction);
  }

  OperationPtr node_out(size_t block) override {
    if (layout_->one_each()) return nullptr;
    std::vector<Source> sources(layout_->local_size());
    std::vector<Sink> sinks(layout_->local_size());
    const size_t self = layout_->local_rank();
    if (!to_root()) {
      for (size_t leader = 0; leader < leaders_; ++leader) sinks[leader] = result(block, leader);
      if (leads()) sources.assign(sources.size(), {sinks[self].data, sinks[self].count});
      return exchange(std::move(sources), std::move(sinks), PeerExchange::Cast::kMulti);
    }
    if (static_cast<int>(layout_->node) != root_node()) return nullptr;
    const size_t root = layout_->local_rank_of(signature_.root);
    if (leads()) sources[root] = {reduced(block), shard(block, self).count};
    if (self == root) {
      for (size_t leader = 0; leader < leaders_; ++leader) sinks[leader] = result(block, leader);
    }
    return exchange(std::move(sources), std::move(sinks), PeerExchange::Cast::kUni);
  }

  OperationPtr exchange(std::vector<Source> sources, std::vector<Sink> sinks,
                        PeerExchange::Cast cast) const {
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, count_,
                                          std::move(sources), std::move(sinks), cast);
  }

  const Source in_;
  const Sink out_;
  const Signature partial_signature_;
  const Stages stages_;
  const size_t leaders_;
  BlockCut cut_;
  Scratch partial_;  // of a leader: its shard of the node's result, if that cannot be in out_
  Scratch wide_;     // for this rank's widened input for the block in node_in()
};

// reduce_scatter. node_in: the ranks of a node reduce. Leader i gets the node's partial results for
// local ranks i, i + leaders_, i + 2 * leaders_ and so on of every node. inter_node: the leaders of
// a rail exchange and reduce these results. node_out: a leader passes on the results that are for
// other ranks.
class LeaderReduceScatter final : public LeaderOperation {
 public:
  LeaderReduceScatter(std::shared_ptr<const NodeLayout> layout, const Signature& signature,
                      std::vector<Source> inputs, void* out)
      : LeaderOperation(std::move(layout), signature, inputs.front().count),
        inputs_(std::move(inputs)),
        out_{out, inputs_[self_rank()].count},
        total_(count_of(inputs_)),
        partial_signature_(of_partial_results(*layout_, signature)),
        stages_(stages_of(*layout_, signature.dtype, signature.reduce_op)),
        leaders_(leaders_of(*layout_, total_ * element())) {
    size_t longest = 0;
    for (const Source& input : inputs_) longest = std::max(longest, input.count);
    const size_t rows = (layout_->most_local_ranks + leaders_ - 1) / leaders_;
    cut_ = cut(*layout_, longest, operand(), rows, 1);
    const size_t row = std::min(cut_.block, longest);
    const size_t nodes = layout_->nodes.size();
    const size_t partial_bytes = nodes * rows * row * operand();
    set_blocks(cut_.blocks, 2 * (nodes - 1) * rows * row * operand(),
               layout_->one_each() ? 0 : partial_bytes);
    if (leads() && !layout_->one_each()) {
      partial_.acquire(*layout_->staging, ahead(), partial_bytes);
      if (passes_on()) result_.acquire(*layout_->staging, ahead(), rows * row * element());
    }
    if (widens()) wide_.acquire(*layout_->staging, 1, layout_->ranks() * row * operand());
    log_cut(leaders_, cut_.block * element());
  }

 private:
  size_t self_rank() const {
    return static_cast<size_t>(layout_->shm_group->local_rank(layout_->local_rank()).group_rank);
  }
  bool leads() const { return layout_->local_rank() < leaders_; }
  bool passes_on() const { return layout_->local_size() > leaders_; }
  bool widens() const { return partial_signature_.partial.has_value(); }
  size_t operand() const { return element_size(partial_signature_.operands()); }

  // Returns this rank's input for the ranks of `node` for which the leader `local_rank` reduces.
  Sources rows(size_t node, size_t local_rank, size_t block) const {
    Sources found;
    const std::vector<int>& local_ranks = layout_->nodes[node];
    for (size_t at = local_rank; at < local_ranks.size(); at += leaders_) {
      const Source& whole = inputs_[static_cast<size_t>(local_ranks[at])];
      found.push_back(part_of(whole, cut_.range(whole.count, block), element()));
    }
    return found;
  }
  Sink own(size_t block) const { return part_of(out_, cut_.range(out_.count, block), element()); }

  OperationPtr node_in(size_t block) override {
    if (layout_->one_each()) return nullptr;
    std::vector<Sources> inputs(layout_->local_size());
    std::byte* wide = widens() ? wide_.at(0) : nullptr;
    for (size_t leader = 0; leader < leaders_; ++leader) {
      for (size_t node = 0; node < layout_->nodes.size(); ++node) {
        for (Source row : rows(node, leader, block)) {
          if (widens()) {
            kernels::widen(wide, *partial_signature_.partial, row.data, signature_.dtype,
                           row.count);
            row.data = std::exchange(wide, wide + row.count * operand());
          }
          inputs[leader].push_back(row);
        }
      }
    }
    return std::make_unique<shm::ScatterGatherReduceScatter>(
        layout_->shm_group, partial_signature_, count_, std::move(inputs),
        leads() ? partial_.at(block) : nullptr, stages_.node);
  }

  OperationPtr inter_node(size_t block) override {
    if (!leads()) return nullptr;
    const size_t local_rank = layout_->local_rank();
    std::vector<Source> parts;
    size_t offset = 0;
    for (size_t node = 0; node < layout_->nodes.size(); ++node) {
      const Sources found = rows(node, local_rank, block);
      const size_t count = count_of(found);
      if (layout_->one_each()) {
        parts.push_back(found.front());
      } else {
        parts.push_back({partial_.at(block) + offset, count});
      }
      offset += count * operand();
    }
    void* const out = passes_on() ? result_.at(block) : own(block).data;
    return mpi::make_reduce_scatter(channel_of(block), partial_signature_, std::move(parts), out,
                                    stages_.inter_node,
                                    std::vector<size_t>(layout_->nodes.size(), total_));
  }

  OperationPtr node_out(size_t block) override {
    if (!passes_on()) return nullptr;
    std::vector<Source> sources(layout_->local_size());
    std::vector<Sink> sinks(layout_->local_size());
    const size_t local_rank = layout_->local_rank();
    sinks[local_rank % leaders_] = own(block);
    if (leads()) {
      size_t offset = 0;
      size_t receiver = local_rank;
      for (const Source& row : rows(layout_->node, local_rank, block)) {
        sources[receiver] = {result_.at(block) + offset, row.count};
        offset += row.count * element();
        receiver += leaders_;
      }
    }
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, count_,
                                          std::move(sources), std::move(sinks),
                                          PeerExchange::Cast::kUni);
  }

  const std::vector<Source> inputs_;
  const Sink out_;
  const size_t total_;
  const Signature partial_signature_;
  const Stages stages_;
  const size_t leaders_;
  BlockCut cut_;
  Scratch partial_;  // of a leader: the node's result for the ranks of each node
  Scratch result_;   // of a leader that passes results on
  Scratch wide_;     // for this rank's widened input for the block in node_in()
};

}  // namespace

OperationPtr HierarchicalCommunicator::allreduce(OperationNumber sequence, const void* in,
                                                 void* out, size_t count, Dtype dtype,
                                                 ReduceOp op) {
  const Signature signature{OpCode::kAllreduce, dtype, op, -1, sequence};
  return std::make_unique<LeaderReduction>(layout_, signature, in, out, count);
}

OperationPtr HierarchicalCommunicator::reduce(OperationNumber sequence, const void* in, void* out,
                                              size_t count, Dtype dtype, ReduceOp op, int root) {
  const Signature signature{OpCode::kReduce, dtype, op, root, sequence};
  return std::make_unique<LeaderReduction>(layout_, signature, in, out, count);
}

OperationPtr HierarchicalCommunicator::reduce_scatter(OperationNumber sequence,
                                                      const std::vector<Source>& inputs, void* out,
                                                      Dtype dtype, ReduceOp op) {
  const Signature signature{OpCode::kReduceScatter, dtype, op, -1, sequence};
  return std::make_unique<LeaderReduceScatter>(layout_, signature, inputs, out);
}

}  // namespace hbm::communicator::hierarchical
