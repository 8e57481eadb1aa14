// The collectives over several nodes that move data without reducing it.
#include <algorithm>
#include <utility>

#include "communicator/hierarchical/communicator.h"
#include "communicator/hierarchical/cut.h"
#include "communicator/hierarchical/leader_operation.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/mpi/collectives.h"
#include "communicator/mpi/tuning.h"
#include "communicator/mpi/window.h"
#include "communicator/scatter_gather.h"
#include "communicator/shm/peer_transfers.h"
#include "communicator/shm/reduction.h"

namespace hbm::communicator::hierarchical {
namespace {

using shm::PeerExchange;

// Returns the numbers from 0 to count - 1 except `self`, in cyclic order from self + 1 on.
std::vector<int> others(size_t count, size_t self) {
  std::vector<int> found;
  for (size_t step = 1; step < count; ++step) {
    found.push_back(static_cast<int>((self + step) % count));
  }
  return found;
}

// Returns the other ranks of a channel.
std::vector<int> others(const mpi::Channel& channel) {
  return others(static_cast<size_t>(channel.size), static_cast<size_t>(channel.rank));
}

// The rank to which a rank sends in one turn of an alltoall, and the rank from which it receives;
// -1: none.
struct Partners {
  int to;
  int from;
};

// Returns this rank's turns. In each turn a node sends to one other node and receives from one
// other node. Each of its ranks sends to at most one rank of the receiving node, and receives from
// at most one rank of the sending node.
std::vector<Partners> turns_of(const NodeLayout& layout) {
  const size_t count = layout.nodes.size();
  const auto at = [&layout](size_t node, size_t local_rank) {
    const std::vector<int>& local_ranks = layout.nodes[node];
    return local_rank < local_ranks.size() ? local_ranks[local_rank] : -1;
  };
  std::vector<Partners> turns;
  for (size_t distance = 1; distance < count; ++distance) {
    const size_t next = (layout.node + distance) % count;
    const size_t previous = (layout.node + count - distance) % count;
    for (size_t shift = 0; shift < layout.most_local_ranks; ++shift) {
      const size_t there = (layout.local_rank() + shift) % layout.most_local_ranks;
      const size_t back =
          (layout.local_rank() + layout.most_local_ranks - shift) % layout.most_local_ranks;
      turns.push_back({at(next, there), at(previous, back)});
    }
  }
  return turns;
}

// allgather. node_in: the ranks of a node exchange their inputs. inter_node: the leaders of a rail
// exchange inputs of their nodes. Leader i sends the inputs of local ranks i, i + leaders_, i + 2 *
// leaders_ and so on. node_out: the leaders pass the received inputs to their node. Above
// kUnpacedBytes the nodes take turns. In a turn each node sends to one other node and receives from
// one other node. So a link carries one transfer of a rail at a time.
class LeaderAllgather final : public LeaderOperation {
 public:
  LeaderAllgather(std::shared_ptr<const NodeLayout> layout, const Signature& signature, Source in,
                  std::vector<Sink> outputs)
      : LeaderOperation(std::move(layout), signature, in.count),
        in_(in),
        outputs_(std::move(outputs)),
        total_(count_of(outputs_)),
        leaders_(leaders_of(*layout_, total_ * element())) {
    size_t longest = 0;
    for (const Sink& output : outputs_) longest = std::max(longest, output.count);
    const size_t rows = (layout_->most_local_ranks + leaders_ - 1) / leaders_;
    cut_ = cut(*layout_, longest, element(), rows, 1);
    by_turns_ = total_ * element() > kUnpacedBytes;
    const size_t others = layout_->nodes.size() - 1;
    const size_t messages = 1 + (by_turns_ ? 1 : others);  // of a leader in a block
    set_blocks(cut_.blocks * (by_turns_ ? others : 1), messages * rows * cut_.block * element());
    log_cut(leaders_, cut_.block * element());
  }

 private:
  bool leads() const { return layout_->local_rank() < leaders_; }
  bool inter_node_follows_node() const override {
    return leads() && layout_->local_size() > leaders_;
  }

  // Returns the part of a transfer of `count` elements in a block. With turns, the blocks of each
  // turn together have all parts of the transfer.
  ElementRange range(size_t count, size_t block) const {
    return cut_.range(count, block % cut_.blocks);
  }
  // Returns the nodes to which this node sends in a block if `to` is true, else the nodes from
  // which it receives.
  std::vector<int> peers(size_t block, bool to) const {
    const size_t nodes = layout_->nodes.size();
    if (!by_turns_) return others(nodes, layout_->node);
    const size_t distance = 1 + block / cut_.blocks;
    return {static_cast<int>((layout_->node + (to ? distance : nodes - distance)) % nodes)};
  }

  Source own(size_t block) const { return part_of(in_, range(in_.count, block), element()); }
  Sink output(int rank, size_t block) const {
    const Sink& whole = outputs_[static_cast<size_t>(rank)];
    return part_of(whole, range(whole.count, block), element());
  }

  // Returns the outputs that the leader `local_rank` exchanges for the ranks of `node`.
  Sinks rows(size_t node, size_t local_rank, size_t block) const {
    Sinks found;
    const std::vector<int>& local_ranks = layout_->nodes[node];
    for (size_t at = local_rank; at < local_ranks.size(); at += leaders_) {
      found.push_back(output(local_ranks[at], block));
    }
    return found;
  }

  OperationPtr node_in(size_t block) override {
    if (block >= cut_.blocks) return nullptr;
    std::vector<Sink> sinks;
    for (const int rank : layout_->nodes[layout_->node]) sinks.push_back(output(rank, block));
    std::vector<Source> sources(sinks.size(), own(block));
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, count_,
                                          std::move(sources), std::move(sinks),
                                          PeerExchange::Cast::kMulti);
  }

  OperationPtr inter_node(size_t block) override {
    if (!leads()) return nullptr;
    const size_t local_rank = layout_->local_rank();
    mpi::OutgoingTransfer outgoing{{}, peers(block, true), total_};
    for (const Sink& row : rows(layout_->node, local_rank, block)) {
      outgoing.entries.push_back({row.data, row.count});
    }
    outgoing.entries.front() = own(block);
    std::vector<mpi::IncomingTransfer> incoming;
    for (const int peer : peers(block, false)) {
      incoming.push_back({rows(static_cast<size_t>(peer), local_rank, block), peer, total_});
    }
    return mpi::make_exchange(channel_of(block), signature_, count_, {std::move(outgoing)},
                              std::move(incoming), {});
  }

  OperationPtr node_out(size_t block) override {
    if (layout_->local_size() == 1) return nullptr;
    std::vector<Sinks> incoming(layout_->local_size());
    for (size_t leader = 0; leader < leaders_; ++leader) {
      for (const int node : peers(block, false)) {
        const Sinks theirs = rows(static_cast<size_t>(node), leader, block);
        incoming[leader].insert(incoming[leader].end(), theirs.begin(), theirs.end());
      }
    }
    Sources outgoing;
    for (const Sink& row : incoming[layout_->local_rank()])
      outgoing.push_back({row.data, row.count});
    incoming[layout_->local_rank()].clear();
    return std::make_unique<shm::ScatterGatherExchange>(layout_->shm_group, signature_, count_,
                                                        std::move(outgoing), std::move(incoming));
  }

  const Source in_;
  const std::vector<Sink> outputs_;
  const size_t total_;
  const size_t leaders_;
  BlockCut cut_;
  bool by_turns_ = false;
};

// broadcast. node_in: the root publishes a block to its node. inter_node: each leader of the root's
// node sends a shard of the block to the leaders of its rail, or along a chain of them. node_out:
// the leaders of other nodes pass their shards to their node.
//
// With one leader for each node, the leader has the root's local rank if all nodes have that local
// rank. The root itself then sends its data to other nodes. Otherwise the leader's local rank is
// the root's local rank modulo the number of ranks of the smallest node.
//
// With two nodes and more than kUnpacedBytes, a receiving leader sends an empty answer for each
// block when it begins to wait for the block. So a sending leader is ahead by at most the blocks in
// flight of both, however much data its sockets accept.
class LeaderBroadcast final : public LeaderOperation {
 public:
  LeaderBroadcast(std::shared_ptr<const NodeLayout> layout, const Signature& signature, void* data,
                  size_t count)
      : LeaderOperation(std::move(layout), signature, count),
        data_(data),
        root_node_(layout_->node_of(signature.root)),
        root_local_rank_(layout_->local_rank_of(signature.root)),
        leaders_(leaders_of(*layout_, count * element())),
        first_(leaders_ == 1 ? root_local_rank_ % layout_->leaders : 0) {
    const size_t receivers = layout_->nodes.size() - 1;
    chained_ = receivers > 1 && count * element() >= leaders_ * receivers * kChainBytesPerLeader;
    answered_ = receivers == 1 && count * element() > kUnpacedBytes;
    if (chained_) {
      cut_ = cut(*layout_, count, element(), 1, leaders_, kOfChain);
    } else {
      const Grain grain = receivers > 1 ? kFine : kCoarse;
      cut_ = cut(*layout_, count, element(), 1, leaders_ * receivers, grain);
    }
    const size_t passes = receivers > 1 ? 2 : 1;
    set_blocks(cut_.blocks, passes * cut_.block * element() / leaders_);
    log_cut(leaders_, cut_.block * element());
  }

 private:
  // The difference is unsigned: a local rank below first_ gives a large number.
  bool leads() const { return layout_->local_rank() - first_ < leaders_; }
  bool on_root_node() const { return layout_->node == root_node_; }
  bool is_root() const { return on_root_node() && layout_->local_rank() == root_local_rank_; }
  bool inter_node_follows_node() const override { return on_root_node() && !is_root(); }

  Sink part(ElementRange range) const { return part_of(Sink{data_, count_}, range, element()); }

  Sink shard(size_t block, size_t leader) const {
    const ElementRange whole = cut_.range(count_, block);
    ElementRange part_of_it = shm::share_of(whole.count, element(), leaders_, leader - first_);
    part_of_it.offset += whole.offset;
    return part(part_of_it);
  }

  OperationPtr node_in(size_t block) override {
    if (!on_root_node() || layout_->local_size() == 1) return nullptr;
    const Sink whole = part(cut_.range(count_, block));
    std::vector<Source> sources(layout_->local_size());
    std::vector<Sink> sinks(layout_->local_size());
    if (is_root()) {
      sources.assign(sources.size(), {whole.data, whole.count});
    } else {
      sinks[root_local_rank_] = whole;
    }
    return exchange(std::move(sources), std::move(sinks));
  }

  OperationPtr inter_node(size_t block) override {
    if (!leads()) return nullptr;
    const Sink mine = shard(block, layout_->local_rank());
    if (answered_) return answered_exchange(block, mine);
    // In the first block every node gets a message from the root's node, even with a chain. So
    // nodes that disagree about the broadcast find out.
    const auto make = chained_ && block > 0 ? mpi::make_chain_broadcast : mpi::make_broadcast;
    return make(channel_of(block), signature_, mine.data, mine.count, static_cast<int>(root_node_),
                count_);
  }

  // Exchanges a block between this rail's two leaders: the leader on the root's node sends the
  // block, and the other leader sends an empty answer.
  OperationPtr answered_exchange(size_t block, const Sink& mine) {
    const int peer = static_cast<int>(1 - layout_->node);
    mpi::OutgoingTransfer outgoing{{}, {peer}, count_};
    mpi::IncomingTransfer incoming{{}, peer, count_};
    if (on_root_node()) {
      outgoing.entries.push_back({mine.data, mine.count});
    } else {
      incoming.entries.push_back(mine);
    }
    return mpi::make_exchange(channel_of(block), signature_, count_, {std::move(outgoing)},
                              {std::move(incoming)}, {});
  }

  OperationPtr node_out(size_t block) override {
    if (on_root_node() || layout_->local_size() == 1) return nullptr;
    std::vector<Source> sources(layout_->local_size());
    std::vector<Sink> sinks(layout_->local_size());
    for (size_t leader = first_; leader < first_ + leaders_; ++leader) {
      sinks[leader] = shard(block, leader);
    }
    if (leads()) {
      Sink& own = sinks[layout_->local_rank()];
      sources.assign(sources.size(), {own.data, own.count});
    }
    return exchange(std::move(sources), std::move(sinks));
  }

  OperationPtr exchange(std::vector<Source> sources, std::vector<Sink> sinks) const {
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, count_,
                                          std::move(sources), std::move(sinks),
                                          PeerExchange::Cast::kMulti);
  }

  void* const data_;
  const size_t root_node_;
  const size_t root_local_rank_;
  const size_t leaders_;
  const size_t first_;  // local rank of the first leader
  bool chained_ = false;
  bool answered_ = false;
  BlockCut cut_;
};

// barrier. First the ranks of each node wait for one another, then the ranks with local rank 0 on
// all nodes, then the ranks of each node again.
class LeaderBarrier final : public LeaderOperation {
 public:
  LeaderBarrier(std::shared_ptr<const NodeLayout> layout, const Signature& signature)
      : LeaderOperation(std::move(layout), signature, 0) {
    log_cut(1, 0);
  }

 private:
  OperationPtr node_in(size_t) override {
    const size_t local_size = layout_->local_size();
    if (local_size == 1) return nullptr;
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, 0,
                                          std::vector<Source>(local_size),
                                          std::vector<Sink>(local_size), PeerExchange::Cast::kUni);
  }

  OperationPtr inter_node(size_t block) override {
    if (layout_->local_rank() != 0) return nullptr;
    std::vector<mpi::IncomingTransfer> incoming;
    for (const int peer : others(*channel_of(block))) incoming.push_back({{}, peer, 0});
    return mpi::make_exchange(channel_of(block), signature_, 0,
                              {{{}, others(*channel_of(block)), 0}}, std::move(incoming), {});
  }

  OperationPtr node_out(size_t block) override { return node_in(block); }
};

// gather, scatter and alltoall. Transfers within a node use shared memory. At the same time,
// transfers between nodes go from rank to rank over MPI. A transfer crosses the link once,
// whichever rank sends it, so every rank is its own leader.
//
// A rank with much data to exchange in an alltoall uses turns, one in each block, so that few
// transfers share a link at a time. On a link with a delay, several turns are in flight. Each
// transfer has the same turn on both ranks, and all ranks take turns in the same order. A rank with
// little data has all transfers in one block: one message to each peer, and no message waits for
// another. So, by induction over the turns, no rank waits forever.
//
// With one rank on each node the rail is the whole group, and this operation uses the channel of
// the rail. All collectives of the group then use one MPI communicator. So a message that a rank
// leaves unread ends the next collective with an error.
class DirectExchange final : public LeaderOperation {
 public:
  // `outgoing` and `incoming`: by group rank. With a root, only the transfers to or from the root
  // are not empty.
  DirectExchange(std::shared_ptr<const NodeLayout> layout, std::shared_ptr<mpi::Channel> channel,
                 const Signature& signature, size_t count, std::vector<Source> outgoing,
                 std::vector<Sink> incoming)
      : LeaderOperation(std::move(layout), signature, count),
        channel_(layout_->one_each() ? layout_->rail.front() : std::move(channel)),
        outgoing_(std::move(outgoing)),
        incoming_(std::move(incoming)),
        turns_(by_turns() ? turns_of(*layout_) : std::vector<Partners>{}) {
    if (!turns_.empty()) channel_ = finer(*channel_);
    set_blocks(std::max<size_t>(1, turns_.size()), 0);
    log_cut(layout_->local_size(), count * element());
  }

 private:
  bool inter_node_follows_node() const override { return false; }
  // One turn, unless the link has a delay. Turns that are in flight together are with different
  // ranks, so they may use the same tags.
  size_t most_in_flight() const override {
    if (!mpi::is_distant(*channel_)) return 1;
    size_t longest = 0;
    for (const Source& source : outgoing_) longest = std::max(longest, source.count);
    const size_t staging = std::min<size_t>(2 * longest * element(), mpi::kMostOperationBytes);
    return std::min<size_t>(mpi::rounds_in_flight(*channel_, staging), mpi::kTagRanges);
  }
  bool remote(int rank) const { return layout_->node_of(rank) != layout_->node; }
  int self() const { return channel_->rank; }

  static std::shared_ptr<mpi::Channel> finer(const mpi::Channel& channel) {
    auto made = std::make_shared<mpi::Channel>(channel);
    made->chunk_bytes = std::min(made->chunk_bytes, kLongestTurnMessageBytes);
    return made;
  }

  // Returns true if the exchange uses turns. Returns false if a node has at least twice as many
  // ranks as another: some ranks of the larger node would have no peer in most turns. They would
  // send ahead of their turn, and so delay the transfer for which all other ranks wait.
  bool by_turns() const {
    if (signature_.root >= 0 || 2 * layout_->leaders <= layout_->most_local_ranks) return false;
    size_t longest = 0;
    for (const Source& source : outgoing_) longest = std::max(longest, source.count);
    for (const Sink& sink : incoming_) longest = std::max(longest, sink.count);
    return longest * element() > std::min(kUnpacedBytes, layout_->chunk_bytes);
  }

  std::vector<int> inter_node_peers(size_t first) const override {
    std::vector<int> ranks;
    for (size_t block = first; block < turns_.size(); ++block) {
      for (const int peer : {turns_[block].to, turns_[block].from}) {
        if (peer >= 0) ranks.push_back(peer);
      }
    }
    return ranks;
  }

  bool sends_to(int peer) const {
    if (signature_.op == OpCode::kGather) return peer == signature_.root;
    return signature_.op != OpCode::kScatter || self() == signature_.root;
  }
  bool receives_from(int peer) const {
    if (signature_.op == OpCode::kScatter) return peer == signature_.root;
    return signature_.op != OpCode::kGather || self() == signature_.root;
  }

  OperationPtr node_in(size_t block) override {
    if (block > 0 || (signature_.root >= 0 && remote(signature_.root))) return nullptr;
    std::vector<Source> sources;
    std::vector<Sink> sinks;
    for (const int rank : layout_->nodes[layout_->node]) {
      sources.push_back(outgoing_[static_cast<size_t>(rank)]);
      sinks.push_back(incoming_[static_cast<size_t>(rank)]);
    }
    return std::make_unique<PeerExchange>(layout_->shm_group, signature_, count_,
                                          std::move(sources), std::move(sinks),
                                          PeerExchange::Cast::kUni);
  }

  OperationPtr inter_node(size_t block) override {
    std::vector<mpi::OutgoingTransfer> outgoing;
    std::vector<mpi::IncomingTransfer> incoming;
    const auto send = [&](int peer) {
      const Source& source = outgoing_[static_cast<size_t>(peer)];
      outgoing.push_back({{source}, {peer}, source.count});
    };
    const auto receive = [&](int peer) {
      const Sink& sink = incoming_[static_cast<size_t>(peer)];
      incoming.push_back({{sink}, peer, sink.count});
    };
    if (!turns_.empty()) {
      if (turns_[block].to >= 0) send(turns_[block].to);
      if (turns_[block].from >= 0) receive(turns_[block].from);
    } else {
      for (const int peer : others(*channel_)) {
        if (!remote(peer)) continue;
        if (sends_to(peer)) send(peer);
        if (receives_from(peer)) receive(peer);
      }
    }
    if (outgoing.empty() && incoming.empty()) return nullptr;
    return mpi::make_exchange(channel_, signature_, count_, std::move(outgoing),
                              std::move(incoming), {});
  }

  OperationPtr node_out(size_t) override { return nullptr; }

  std::shared_ptr<mpi::Channel> channel_;
  const std::vector<Source> outgoing_;
  const std::vector<Sink> incoming_;
  const std::vector<Partners> turns_;  // empty: all transfers together
};

}  // namespace

OperationPtr HierarchicalCommunicator::allgather(OperationNumber sequence, Source in,
                                                 const std::vector<Sink>& outputs, Dtype dtype) {
  const Signature signature{OpCode::kAllgather, dtype, ReduceOp::kSum, -1, sequence};
  return std::make_unique<LeaderAllgather>(layout_, signature, in, outputs);
}

OperationPtr HierarchicalCommunicator::broadcast(OperationNumber sequence, void* data, size_t count,
                                                 Dtype dtype, int root) {
  const Signature signature{OpCode::kBroadcast, dtype, ReduceOp::kSum, root, sequence};
  return std::make_unique<LeaderBroadcast>(layout_, signature, data, count);
}

OperationPtr HierarchicalCommunicator::gather(OperationNumber sequence, Source in,
                                              const std::vector<Sink>& outputs, Dtype dtype,
                                              int root) {
  const Signature signature{OpCode::kGather, dtype, ReduceOp::kSum, root, sequence};
  std::vector<Source> outgoing(ranks());
  outgoing[static_cast<size_t>(root)] = in;
  return std::make_unique<DirectExchange>(layout_, channel_, signature, in.count,
                                          std::move(outgoing),
                                          outputs.empty() ? std::vector<Sink>(ranks()) : outputs);
}

OperationPtr HierarchicalCommunicator::scatter(OperationNumber sequence,
                                               const std::vector<Source>& inputs, Sink out,
                                               Dtype dtype, int root) {
  const Signature signature{OpCode::kScatter, dtype, ReduceOp::kSum, root, sequence};
  std::vector<Sink> incoming(ranks());
  incoming[static_cast<size_t>(root)] = out;
  return std::make_unique<DirectExchange>(layout_, channel_, signature, out.count,
                                          inputs.empty() ? std::vector<Source>(ranks()) : inputs,
                                          std::move(incoming));
}

OperationPtr HierarchicalCommunicator::alltoall(OperationNumber sequence,
                                                const std::vector<Source>& inputs,
                                                const std::vector<Sink>& outputs, Dtype dtype) {
  const Signature signature{OpCode::kAlltoall, dtype, ReduceOp::kSum, -1, sequence};
  return std::make_unique<DirectExchange>(layout_, channel_, signature, count_of(inputs), inputs,
                                          outputs);
}

OperationPtr HierarchicalCommunicator::barrier(OperationNumber sequence) {
  const Signature signature{OpCode::kBarrier, Dtype::kUInt8, ReduceOp::kSum, -1, sequence};
  return std::make_unique<LeaderBarrier>(layout_, signature);
}

}  // namespace hbm::communicator::hierarchical
