// The collectives of several nodes that move data and reduce nothing.
#include <algorithm>
#include <utility>

#include "communicator/hierarchical/communicator.h"
#include "communicator/hierarchical/cut.h"
#include "communicator/hierarchical/leader_operation.h"
#include "communicator/hierarchical/tuning.h"
#include "communicator/mpi/collectives.h"
#include "communicator/mpi/tuning.h"
#include "communicator/pieces.h"
#include "communicator/shm/reduction.h"
#include "communicator/shm/streams.h"

namespace hbm::hierarchical {
namespace {

using shm::StreamExchange;

// The numbers below `count` but `self`, the next one first.
std::vector<int> others(size_t count, size_t self) {
  std::vector<int> found;
  for (size_t step = 1; step < count; ++step) {
    found.push_back(static_cast<int>((self + step) % count));
  }
  return found;
}

// The other ranks of a channel.
std::vector<int> others(const mpi::Channel& channel) {
  return others(static_cast<size_t>(channel.size), static_cast<size_t>(channel.rank));
}

// Whom a rank sends to and whom it receives from in a turn of an alltoall; -1: nobody.
struct Partners {
  int to;
  int from;
};

// A rank's turns: a node sends to one other node at a time and receives from one, each rank to and
// from another rank there.
std::vector<Partners> turns_of(const NodeLayout& layout) {
  const size_t count = layout.nodes.size();
  const auto at = [&layout](size_t node, size_t place) {
    const std::vector<int>& members = layout.nodes[node];
    return place < members.size() ? members[place] : -1;
  };
  std::vector<Partners> turns;
  for (size_t distance = 1; distance < count; ++distance) {
    const size_t next = (layout.node + distance) % count;
    const size_t previous = (layout.node + count - distance) % count;
    for (size_t shift = 0; shift < layout.most_members; ++shift) {
      const size_t there = (layout.place() + shift) % layout.most_members;
      const size_t back = (layout.place() + layout.most_members - shift) % layout.most_members;
      turns.push_back({at(next, there), at(previous, back)});
    }
  }
  return turns;
}

// allgather: the members of a node show each other what they have; the leaders of a column exchange
// it, each for the members whose place is its own (or its own and a multiple of the leaders more);
// and hand out what came. Where there is much, a node sends to one other node at a time and
// receives from one, turn by turn, so that one stream of a column at a time is on a link.
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
    const size_t rows = (layout_->most_members + leaders_ - 1) / leaders_;
    cut_ = cut(*layout_, longest, element(), rows, 1);
    by_turns_ = total_ * element() > kUnpacedBytes;
    set_blocks(cut_.blocks * (by_turns_ ? layout_->nodes.size() - 1 : 1));
    tell(leaders_, cut_.block * element());
  }

 private:
  bool leads() const { return layout_->place() < leaders_; }
  bool link_follows_node() const override { return leads() && layout_->members() > leaders_; }

  // A block is a part of each stream, in a turn.
  ElementRange range(size_t count, size_t block) const {
    return cut_.range(count, block % cut_.blocks);
  }
  // The nodes that this one sends to, or receives from, in a block.
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

  // The outputs that leader `place` exchanges for the members of `node`.
  Sinks rows(size_t node, size_t place, size_t block) const {
    Sinks found;
    const std::vector<int>& members = layout_->nodes[node];
    for (size_t at = place; at < members.size(); at += leaders_) {
      found.push_back(output(members[at], block));
    }
    return found;
  }

  OperationPtr node_in(size_t block) override {
    if (block >= cut_.blocks) return nullptr;
    std::vector<Sink> sinks;
    for (const int rank : layout_->nodes[layout_->node]) sinks.push_back(output(rank, block));
    std::vector<Source> sources(sinks.size(), own(block));
    return std::make_unique<StreamExchange>(layout_->shm_group, signature_, count_,
                                            std::move(sources), std::move(sinks),
                                            StreamExchange::Cast::kMulti);
  }

  OperationPtr link(size_t block) override {
    if (!leads()) return nullptr;
    const size_t place = layout_->place();
    mpi::OutgoingStream outgoing{{}, peers(block, true), total_};
    for (const Sink& row : rows(layout_->node, place, block)) {
      outgoing.pieces.push_back({row.data, row.count});
    }
    outgoing.pieces.front() = own(block);
    std::vector<mpi::IncomingStream> incoming;
    for (const int peer : peers(block, false)) {
      incoming.push_back({rows(static_cast<size_t>(peer), place, block), peer, total_});
    }
    return mpi::make_exchange(lane(block), signature_, count_, {std::move(outgoing)},
                              std::move(incoming), {});
  }

  OperationPtr node_out(size_t block) override {
    if (layout_->members() == 1) return nullptr;
    std::vector<Sinks> incoming(layout_->members());
    for (size_t leader = 0; leader < leaders_; ++leader) {
      for (const int node : peers(block, false)) {
        const Sinks theirs = rows(static_cast<size_t>(node), leader, block);
        incoming[leader].insert(incoming[leader].end(), theirs.begin(), theirs.end());
      }
    }
    Sources outgoing;
    for (const Sink& row : incoming[layout_->place()]) outgoing.push_back({row.data, row.count});
    incoming[layout_->place()].clear();
    return std::make_unique<shm::PieceExchange>(layout_->shm_group, signature_, count_,
                                                std::move(outgoing), std::move(incoming));
  }

  const Source in_;
  const std::vector<Sink> outputs_;
  const size_t total_;
  const size_t leaders_;
  BlockCut cut_;
  bool by_turns_ = false;
};

// broadcast: the root shows its node a block; each leader sends a shard of it to the leaders of its
// column, or along the chain of them; these hand their shards out. Where one leader does it all, it
// is the one at the root's place, so that the data goes to the link at once.
//
// Where there are two nodes, the leaders of the other one answer each block when they wait for it.
// So the root's are at most four blocks ahead, however much their sockets would take.
class LeaderBroadcast final : public LeaderOperation {
 public:
  LeaderBroadcast(std::shared_ptr<const NodeLayout> layout, const Signature& signature, void* data,
                  size_t count)
      : LeaderOperation(std::move(layout), signature, count),
        data_(data),
        root_node_(layout_->node_of(signature.root)),
        root_place_(layout_->place_of(signature.root)),
        leaders_(leaders_of(*layout_, count * element())),
        first_(leaders_ == 1 ? root_place_ % layout_->leaders : 0) {
    const size_t receivers = layout_->nodes.size() - 1;
    chained_ = receivers > 1 && count * element() >= leaders_ * receivers * kChainBytesPerLeader;
    answered_ = receivers == 1 && count * element() > kUnpacedBytes;
    if (chained_) {
      cut_ = cut(*layout_, count, element(), 1, leaders_, kOfChain);
    } else {
      const Grain grain = receivers > 1 ? kFine : kCoarse;
      cut_ = cut(*layout_, count, element(), 1, leaders_ * receivers, grain);
    }
    set_blocks(cut_.blocks);
    tell(leaders_, cut_.block * element());
  }

 private:
  bool leads() const { return layout_->place() - first_ < leaders_; }  // wraps below first_
  bool on_root_node() const { return layout_->node == root_node_; }
  bool is_root() const { return on_root_node() && layout_->place() == root_place_; }
  bool link_follows_node() const override { return on_root_node() && !is_root(); }

  Sink part(ElementRange range) const { return part_of(Sink{data_, count_}, range, element()); }

  Sink shard(size_t block, size_t leader) const {
    const ElementRange whole = cut_.range(count_, block);
    ElementRange part_of_it = shm::share_of(whole.count, element(), leaders_, leader - first_);
    part_of_it.offset += whole.offset;
    return part(part_of_it);
  }

  OperationPtr node_in(size_t block) override {
    if (!on_root_node() || layout_->members() == 1) return nullptr;
    const Sink whole = part(cut_.range(count_, block));
    std::vector<Source> sources(layout_->members());
    std::vector<Sink> sinks(layout_->members());
    if (is_root()) {
      sources.assign(sources.size(), {whole.data, whole.count});
    } else {
      sinks[root_place_] = whole;
    }
    return exchange(std::move(sources), std::move(sinks));
  }

  OperationPtr link(size_t block) override {
    if (!leads()) return nullptr;
    const Sink mine = shard(block, layout_->place());
    if (answered_) return answered_exchange(block, mine);
    // All of several nodes hear of the root itself first, so that nodes that disagree find out.
    const auto make = chained_ && block > 0 ? mpi::make_chain_broadcast : mpi::make_broadcast;
    return make(lane(block), signature_, mine.data, mine.count, static_cast<int>(root_node_),
                count_);
  }

  // A block to the other node's leader of this place, and nothing back, or the other way round.
  OperationPtr answered_exchange(size_t block, const Sink& mine) {
    const int peer = static_cast<int>(1 - layout_->node);
    mpi::OutgoingStream outgoing{{}, {peer}, count_};
    mpi::IncomingStream incoming{{}, peer, count_};
    if (on_root_node()) {
      outgoing.pieces.push_back({mine.data, mine.count});
    } else {
      incoming.pieces.push_back(mine);
    }
    return mpi::make_exchange(lane(block), signature_, count_, {std::move(outgoing)},
                              {std::move(incoming)}, {});
  }

  OperationPtr node_out(size_t block) override {
    if (on_root_node() || layout_->members() == 1) return nullptr;
    std::vector<Source> sources(layout_->members());
    std::vector<Sink> sinks(layout_->members());
    for (size_t leader = first_; leader < first_ + leaders_; ++leader) {
      sinks[leader] = shard(block, leader);
    }
    if (leads()) {
      Sink& own = sinks[layout_->place()];
      sources.assign(sources.size(), {own.data, own.count});
    }
    return exchange(std::move(sources), std::move(sinks));
  }

  OperationPtr exchange(std::vector<Source> sources, std::vector<Sink> sinks) const {
    return std::make_unique<StreamExchange>(layout_->shm_group, signature_, count_,
                                            std::move(sources), std::move(sinks),
                                            StreamExchange::Cast::kMulti);
  }

  void* const data_;
  const size_t root_node_;
  const size_t root_place_;
  const size_t leaders_;
  const size_t first_;  // leader
  bool chained_ = false;
  bool answered_ = false;
  BlockCut cut_;
};

// barrier: of each node, then of the first members of all, then of each node again.
class LeaderBarrier final : public LeaderOperation {
 public:
  LeaderBarrier(std::shared_ptr<const NodeLayout> layout, const Signature& signature)
      : LeaderOperation(std::move(layout), signature, 0) {
    tell(1, 0);
  }

 private:
  OperationPtr node_in(size_t) override {
    const size_t members = layout_->members();
    if (members == 1) return nullptr;
    return std::make_unique<StreamExchange>(layout_->shm_group, signature_, 0,
                                            std::vector<Source>(members),
                                            std::vector<Sink>(members), StreamExchange::Cast::kUni);
  }

  OperationPtr link(size_t block) override {
    if (layout_->place() != 0) return nullptr;
    std::vector<mpi::IncomingStream> incoming;
    for (const int peer : others(*lane(block))) incoming.push_back({{}, peer, 0});
    return mpi::make_exchange(lane(block), signature_, 0, {{{}, others(*lane(block)), 0}},
                              std::move(incoming), {});
  }

  OperationPtr node_out(size_t block) override { return node_in(block); }
};

// gather, scatter and alltoall: what stays on a node goes through its memory, what leaves it from
// rank to rank over MPI, both at a time. A stream crosses the link once whoever sends it, so every
// rank is its own leader.
//
// A rank with much to exchange in an alltoall goes by turns, a block each, so that few streams at a
// time share a link. Each stream has the same turn at both ends, and turns follow one another in
// one order on all ranks. A rank with little has all streams in one block, and its messages, one to
// each, wait for none: by induction over the turns nobody waits for ever.
//
// Where each node has one rank, the column is the whole group, and its channel carries this too:
// what a rank leaves unread is then in the way of the next collective, and ends it with an error.
class DirectExchange final : public LeaderOperation {
 public:
  // `outgoing` and `incoming`: by rank. With a root, they go to it, or come from it, alone.
  DirectExchange(std::shared_ptr<const NodeLayout> layout, std::shared_ptr<mpi::Channel> channel,
                 const Signature& signature, size_t count, std::vector<Source> outgoing,
                 std::vector<Sink> incoming)
      : LeaderOperation(std::move(layout), signature, count),
        channel_(layout_->one_each() ? layout_->column.front() : std::move(channel)),
        outgoing_(std::move(outgoing)),
        incoming_(std::move(incoming)),
        turns_(by_turns() ? turns_of(*layout_) : std::vector<Partners>{}) {
    if (!turns_.empty()) channel_ = finer(*channel_);
    set_blocks(std::max<size_t>(1, turns_.size()));
    tell(layout_->members(), count * element());
  }

 private:
  bool link_follows_node() const override { return false; }
  size_t most_on_link() const override { return turns_.empty() ? mpi::kLanes : 1; }
  bool remote(int rank) const { return layout_->node_of(rank) != layout_->node; }
  int self() const { return channel_->rank; }

  static std::shared_ptr<mpi::Channel> finer(const mpi::Channel& channel) {
    auto made = std::make_shared<mpi::Channel>(channel);
    made->chunk_bytes = std::min(made->chunk_bytes, kLongestTurnMessageBytes);
    return made;
  }

  // Not where a node has twice as many ranks as another, or more: some of its ranks have nothing to
  // do in most turns, send ahead of their turn, and so hold up the one that all others wait for.
  bool by_turns() const {
    if (signature_.root >= 0 || 2 * layout_->leaders <= layout_->most_members) return false;
    size_t longest = 0;
    for (const Source& source : outgoing_) longest = std::max(longest, source.count);
    for (const Sink& sink : incoming_) longest = std::max(longest, sink.count);
    return longest * element() > std::min(kUnpacedBytes, layout_->chunk_bytes);
  }

  std::vector<int> linked_from(size_t first) const override {
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
    return std::make_unique<StreamExchange>(layout_->shm_group, signature_, count_,
                                            std::move(sources), std::move(sinks),
                                            StreamExchange::Cast::kUni);
  }

  OperationPtr link(size_t block) override {
    std::vector<mpi::OutgoingStream> outgoing;
    std::vector<mpi::IncomingStream> incoming;
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
  const std::vector<Partners> turns_;  // empty: all at once
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

}  // namespace hbm::hierarchical
