// The collectives over MPI that move data without reducing it.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "communicator/mpi/collectives.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

// Moves at most one transfer from each rank to each other rank, in rounds of at most one chunk to
// each peer. At least kLeastInFlight rounds are in flight. The collectives allgather, gather,
// scatter, alltoall and barrier, and the broadcast of a short tensor, are this operation.
class PairwiseExchange final : public Pipeline {
 public:
  PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
                   std::vector<OutgoingTransfer> outgoing, std::vector<IncomingTransfer> incoming,
                   OwnPart local);

  void begin() override;
  std::vector<int> needed() const override;
  bool self_sufficient() const override;

 private:
  void post(Round& round, size_t part) override;
  void deliver(const Round& round, size_t part) override;
  size_t parts_of(size_t count) const;
  size_t part_count(size_t part, size_t count) const;

  const std::vector<OutgoingTransfer> outgoing_;
  const std::vector<IncomingTransfer> incoming_;
  const OwnPart local_;
  const size_t chunk_;  // elements of a message
  size_t longest_ = 0;  // elements of the longest transfer
};

PairwiseExchange::PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature,
                                   size_t count, std::vector<OutgoingTransfer> outgoing,
                                   std::vector<IncomingTransfer> incoming, OwnPart local)
    : Pipeline(std::move(channel), signature, count),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      local_(local),
      chunk_(channel_->chunk_bytes / element()) {
  for (const OutgoingTransfer& transfer : outgoing_) {
    longest_ = std::max(longest_, count_of(transfer.entries));
  }
  for (const IncomingTransfer& transfer : incoming_) {
    longest_ = std::max(longest_, count_of(transfer.entries));
  }
  prepare(parts_of(longest_), outgoing_.size(), incoming_.size(),
          std::min(longest_, chunk_) * element());
}

// An empty transfer still has one message, which shows the peer that this rank runs the same
// operation.
size_t PairwiseExchange::parts_of(size_t count) const {
  return std::max<size_t>(1, (count + chunk_ - 1) / chunk_);
}

size_t PairwiseExchange::part_count(size_t part, size_t count) const {
  return std::min(chunk_, count - part * chunk_);
}

void PairwiseExchange::begin() {
  Pipeline::begin();
  if (local_.sink.count > 0 && local_.sink.data != local_.source.data) {
    std::memcpy(local_.sink.data, local_.source.data, local_.sink.count * element());
  }
}

void PairwiseExchange::post(Round& round, size_t part) {
  for (const IncomingTransfer& transfer : incoming_) {
    const size_t count = count_of(transfer.entries);
    if (part >= parts_of(count)) continue;
    round.receive(transfer.peer, part_count(part, count) * element(), transfer.reported);
  }
  for (const OutgoingTransfer& transfer : outgoing_) {
    const size_t count = count_of(transfer.entries);
    if (part >= parts_of(count)) continue;
    round.send(transfer.peers, transfer.entries, part * chunk_ * element(),
               part_count(part, count) * element(), transfer.reported);
  }
}

void PairwiseExchange::deliver(const Round& round, size_t part) {
  for (const IncomingTransfer& transfer : incoming_) {
    const size_t count = count_of(transfer.entries);
    if (part >= parts_of(count)) continue;
    scatter_entries(transfer.entries, element(), part * chunk_ * element(),
                    part_count(part, count) * element(), round.payload(transfer.peer));
  }
}

std::vector<int> PairwiseExchange::needed() const {
  std::vector<int> ranks = Pipeline::needed();
  const auto add = [&](size_t count, int peer) {
    if (parts_of(count) > posted()) ranks.push_back(channel_->group_rank(peer));
  };
  for (const IncomingTransfer& transfer : incoming_) add(count_of(transfer.entries), transfer.peer);
  for (const OutgoingTransfer& transfer : outgoing_) {
    for (const int peer : transfer.peers) add(count_of(transfer.entries), peer);
  }
  return ranks;
}

bool PairwiseExchange::self_sufficient() const {
  return parts() == 1 && longest_ * element() <= kEagerBytes;
}

std::vector<IncomingTransfer> from_all_but(int rank, const std::vector<Sink>& outputs) {
  std::vector<IncomingTransfer> incoming;
  for (int peer = 0; peer < static_cast<int>(outputs.size()); ++peer) {
    const Sink& sink = outputs[static_cast<size_t>(peer)];
    if (peer != rank) incoming.push_back({{sink}, peer, sink.count});
  }
  return incoming;
}

std::vector<OutgoingTransfer> to_all_but(int rank, const std::vector<Source>& inputs) {
  std::vector<OutgoingTransfer> outgoing;
  const int size = static_cast<int>(inputs.size());
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    const Source& source = inputs[static_cast<size_t>(peer)];
    outgoing.push_back({{source}, {peer}, source.count});
  }
  return outgoing;
}

std::vector<int> all_but(int rank, int size) {
  std::vector<int> others;
  for (int step = 1; step < size; ++step) others.push_back((rank + step) % size);
  return others;
}

// A broadcast of a longer tensor, block by block. The root sends a shard to each other rank (first
// phase). Each of these ranks sends its shard to the other ranks except the root (second phase). No
// link carries the data more than once in either direction. This is Van de Geijn's algorithm,
// except that the root keeps no shard.
class BlockBroadcast final : public TwoPhase {
 public:
  BlockBroadcast(std::shared_ptr<Channel> channel, const Signature& signature, void* data,
                 size_t count, int root, size_t reported)
      : TwoPhase(channel, signature, count, reported, ascending_but(root, channel->size),
                 first_room(*channel, root), second_room(*channel, root)),
        root_(root),
        data_(static_cast<std::byte*>(data)) {}

 private:
  static std::vector<int> ascending_but(int root, int size) {
    std::vector<int> others = all_but(root, size);
    std::sort(others.begin(), others.end());
    return others;
  }
  static Room first_room(const Channel& channel, int root) {
    return channel.rank == root ? Room{static_cast<size_t>(channel.size - 1), 0} : Room{0, 1};
  }
  static Room second_room(const Channel& channel, int root) {
    return channel.rank == root ? Room{0, 0} : Room{1, static_cast<size_t>(channel.size - 2)};
  }

  bool is_root() const { return channel_->rank == root_; }
  std::byte* at(size_t element_index) { return data_ + element_index * element(); }

  void post_first(Round& round, size_t block) override {
    if (!is_root()) {
      round.receive(root_, shard(block, channel_->rank).count * element(), count_);
      return;
    }
    for (const int peer : peers()) {
      const ElementRange theirs = shard(block, peer);
      round.send(std::span(&peer, 1), at(theirs.offset), theirs.count * element(), count_);
    }
  }

  void post_second(Round& round, const Round& first, size_t block) override {
    if (is_root()) return;
    const ElementRange mine = shard(block, channel_->rank);
    const size_t bytes = mine.count * element();
    if (bytes > 0) std::memcpy(at(mine.offset), first.payload(root_), bytes);
    for (const int peer : other_owners()) {
      round.receive(peer, shard(block, peer).count * element(), count_);
    }
    round.send(other_owners(), at(mine.offset), bytes, count_);
  }

  void deliver(const Round& second, size_t block) override {
    if (is_root()) return;
    for (const int peer : other_owners()) {
      const ElementRange theirs = shard(block, peer);
      if (theirs.count == 0) continue;
      std::memcpy(at(theirs.offset), second.payload(peer), theirs.count * element());
    }
  }

  const int root_;
  std::byte* const data_;
};

// A broadcast along a chain of ranks: each rank receives a block and sends it to the next rank.
class ChainBroadcast final : public TwoPhase {
 public:
  ChainBroadcast(std::shared_ptr<Channel> channel, const Signature& signature, void* data,
                 size_t count, int root, size_t reported)
      : TwoPhase(channel, signature, count, reported, {root}, first_room(*channel, root),
                 second_room(*channel, root)),
        root_(root),
        next_((channel_->rank + 1) % channel_->size),
        data_(static_cast<std::byte*>(data)) {}

 private:
  static Room first_room(const Channel& channel, int root) {
    return channel.rank == root ? Room{1, 0} : Room{0, 1};
  }
  static Room second_room(const Channel& channel, int root) {
    const bool passes_on = channel.rank != root && (channel.rank + 1) % channel.size != root;
    return {passes_on ? size_t{1} : 0, 0};
  }

  bool is_root() const { return channel_->rank == root_; }
  int previous() const { return (channel_->rank + channel_->size - 1) % channel_->size; }
  std::byte* at(size_t element_index) { return data_ + element_index * element(); }

  void post_first(Round& round, size_t block) override {
    const ElementRange whole = shard(block, root_);
    const size_t bytes = whole.count * element();
    if (is_root()) {
      round.send(std::span(&next_, 1), at(whole.offset), bytes, count_);
    } else {
      round.receive(previous(), bytes, count_);
    }
  }

  void post_second(Round& round, const Round& first, size_t block) override {
    if (is_root()) return;
    const ElementRange whole = shard(block, root_);
    const size_t bytes = whole.count * element();
    if (bytes > 0) std::memcpy(at(whole.offset), first.payload(previous()), bytes);
    if (next_ != root_) round.send(std::span(&next_, 1), at(whole.offset), bytes, count_);
  }

  int first_phase() const override { return is_root() || previous() == root_ ? 0 : 1; }
  void deliver(const Round&, size_t) override {}

  const int root_;
  const int next_;
  std::byte* const data_;
};

}  // namespace

OperationPtr make_exchange(std::shared_ptr<Channel> channel, const Signature& signature,
                           size_t count, std::vector<OutgoingTransfer> outgoing,
                           std::vector<IncomingTransfer> incoming, OwnPart own) {
  return std::make_unique<PairwiseExchange>(std::move(channel), signature, count,
                                            std::move(outgoing), std::move(incoming), own);
}

OperationPtr make_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                            void* data, size_t count, int root, size_t reported) {
  if (channel->size > 2 && count > 0 &&
      reported * element_size(signature.dtype) > kDirectBroadcastBytes) {
    return std::make_unique<BlockBroadcast>(std::move(channel), signature, data, count, root,
                                            reported);
  }
  std::vector<OutgoingTransfer> outgoing;
  std::vector<IncomingTransfer> incoming;
  if (channel->rank == root) {
    outgoing.push_back({{{data, count}}, all_but(root, channel->size), reported});
  } else {
    incoming.push_back({{{data, count}}, root, reported});
  }
  return make_exchange(std::move(channel), signature, reported, std::move(outgoing),
                       std::move(incoming), {});
}

OperationPtr make_chain_broadcast(std::shared_ptr<Channel> channel, const Signature& signature,
                                  void* data, size_t count, int root, size_t reported) {
  return std::make_unique<ChainBroadcast>(std::move(channel), signature, data, count, root,
                                          reported);
}

OperationPtr MpiCommunicator::broadcast(OperationNumber sequence, void* data, size_t count,
                                        Dtype dtype, int root) {
  const Signature signature{OpCode::kBroadcast, dtype, ReduceOp::kSum, root, sequence};
  return make_broadcast(channel_, signature, data, count, root, count);
}

OperationPtr MpiCommunicator::allgather(OperationNumber sequence, Source in,
                                        const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kAllgather, dtype, ReduceOp::kSum, -1, sequence};
  return make_exchange(channel_, signature, in.count,
                       {{{in}, all_but(rank, channel_->size), in.count}},
                       from_all_but(rank, outputs), {in, outputs[static_cast<size_t>(rank)]});
}

OperationPtr MpiCommunicator::gather(OperationNumber sequence, Source in,
                                     const std::vector<Sink>& outputs, Dtype dtype, int root) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kGather, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    return make_exchange(channel_, signature, in.count, {{{in}, {root}, in.count}}, {}, {});
  }
  return make_exchange(channel_, signature, in.count, {}, from_all_but(rank, outputs),
                       {in, outputs[static_cast<size_t>(rank)]});
}

OperationPtr MpiCommunicator::scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                                      Sink out, Dtype dtype, int root) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kScatter, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    return make_exchange(channel_, signature, out.count, {}, {{{out}, root, out.count}}, {});
  }
  return make_exchange(channel_, signature, out.count, to_all_but(rank, inputs), {},
                       {inputs[static_cast<size_t>(rank)], out});
}

OperationPtr MpiCommunicator::alltoall(OperationNumber sequence, const std::vector<Source>& inputs,
                                       const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel_->rank;
  const auto self = static_cast<size_t>(rank);
  const Signature signature{OpCode::kAlltoall, dtype, ReduceOp::kSum, -1, sequence};
  return make_exchange(channel_, signature, count_of(inputs), to_all_but(rank, inputs),
                       from_all_but(rank, outputs), {inputs[self], outputs[self]});
}

OperationPtr MpiCommunicator::barrier(OperationNumber sequence) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kBarrier, Dtype::kUInt8, ReduceOp::kSum, -1, sequence};
  return make_exchange(channel_, signature, 0, {{{}, all_but(rank, channel_->size), 0}},
                       from_all_but(rank, std::vector<Sink>(ranks())), {});
}

}  // namespace hbm::communicator::mpi
