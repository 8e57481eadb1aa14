// The collectives over MPI that move data and reduce nothing.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"

namespace hbm::mpi {
namespace {

constexpr size_t kFlatBytes = 64 * 1024;  // of a message; above, the root's link is the bound

// Moves one stream of bytes from each rank to each other, in rounds of at most one chunk a peer,
// two rounds in flight. allgather, gather, scatter, alltoall and barrier are this operation.
class PairwiseExchange final : public Pipeline {
 public:
  // An outgoing stream and the peers that get it.
  struct OutgoingStream {
    Source source;
    std::vector<int> peers;
  };
  struct IncomingStream {
    Sink sink;
    int peer;
  };

  // `local` is what this rank gives itself, copied in begin().
  struct OwnPart {
    Source source;
    Sink sink;
  };

  PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
                   std::vector<OutgoingStream> outgoing, std::vector<IncomingStream> incoming,
                   OwnPart local);

  void begin() override;
  bool self_sufficient() const override;

 private:
  void post(Round& round, size_t part) override;
  void deliver(const Round& round, size_t part) override;
  size_t parts_of(size_t count) const;
  size_t part_count(size_t part, size_t count) const;

  const std::vector<OutgoingStream> outgoing_;
  const std::vector<IncomingStream> incoming_;
  const OwnPart local_;
  const size_t chunk_;  // elements a message
  size_t longest_ = 0;  // elements of the longest stream
};

PairwiseExchange::PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature,
                                   size_t count, std::vector<OutgoingStream> outgoing,
                                   std::vector<IncomingStream> incoming, OwnPart local)
    : Pipeline(std::move(channel), signature, count),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      local_(local),
      chunk_(channel_->chunk_bytes / element()) {
  for (const OutgoingStream& stream : outgoing_) longest_ = std::max(longest_, stream.source.count);
  for (const IncomingStream& stream : incoming_) longest_ = std::max(longest_, stream.sink.count);
  prepare(parts_of(longest_), outgoing_.size(), incoming_.size(),
          std::min(longest_, chunk_) * element());
}

// A stream of nothing still has one message: it tells the peer that this rank has come.
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
  for (const IncomingStream& stream : incoming_) {
    if (part >= parts_of(stream.sink.count)) continue;
    round.receive(stream.peer, part_count(part, stream.sink.count) * element(), stream.sink.count);
  }
  for (const OutgoingStream& stream : outgoing_) {
    if (part >= parts_of(stream.source.count)) continue;
    const auto* from =
        static_cast<const std::byte*>(stream.source.data) + part * chunk_ * element();
    round.send(stream.peers, from, part_count(part, stream.source.count) * element(),
               stream.source.count);
  }
}

void PairwiseExchange::deliver(const Round& round, size_t part) {
  for (const IncomingStream& stream : incoming_) {
    if (part >= parts_of(stream.sink.count)) continue;
    const size_t bytes = part_count(part, stream.sink.count) * element();
    if (bytes == 0) continue;
    auto* to = static_cast<std::byte*>(stream.sink.data) + part * chunk_ * element();
    std::memcpy(to, round.payload(stream.peer), bytes);
  }
}

bool PairwiseExchange::self_sufficient() const {
  return parts() == 1 && longest_ * element() <= kEagerBytes;
}

size_t total(const std::vector<Source>& parts) {
  size_t count = 0;
  for (const Source& part : parts) count += part.count;
  return count;
}

std::vector<PairwiseExchange::IncomingStream> from_all_but(int rank,
                                                           const std::vector<Sink>& outputs) {
  std::vector<PairwiseExchange::IncomingStream> incoming;
  for (int peer = 0; peer < static_cast<int>(outputs.size()); ++peer) {
    if (peer != rank) incoming.push_back({outputs[static_cast<size_t>(peer)], peer});
  }
  return incoming;
}

std::vector<PairwiseExchange::OutgoingStream> to_all_but(int rank,
                                                         const std::vector<Source>& inputs) {
  std::vector<PairwiseExchange::OutgoingStream> outgoing;
  const int size = static_cast<int>(inputs.size());
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    outgoing.push_back({inputs[static_cast<size_t>(peer)], {peer}});
  }
  return outgoing;
}

std::vector<int> all_but(int rank, int size) {
  std::vector<int> others;
  for (int step = 1; step < size; ++step) others.push_back((rank + step) % size);
  return others;
}

// A large broadcast, block by block: the root deals one shard to each rank (first phase) and each
// rank hands its own to the others (second phase), so that the root's link carries the data about
// twice, however many ranks there are. Van de Geijn's scheme.
class BlockBroadcast final : public TwoPhase {
 public:
  BlockBroadcast(std::shared_ptr<Channel> channel, const Signature& signature, void* data,
                 size_t count)
      : TwoPhase(channel, signature, count, first_room(*channel, signature.root),
                 second_room(*channel, signature.root)),
        data_(static_cast<std::byte*>(data)) {}

 private:
  static Room first_room(const Channel& channel, int root) {
    const auto peers = static_cast<size_t>(channel.size - 1);
    return channel.rank == root ? Room{peers, 0} : Room{0, 1};
  }
  static Room second_room(const Channel& channel, int root) {
    const auto peers = static_cast<size_t>(channel.size - 1);
    return channel.rank == root ? Room{1, 0} : Room{1, peers};
  }

  bool is_root() const { return channel_->rank == signature_.root; }
  std::byte* at(size_t element_index) { return data_ + element_index * element(); }

  void post_first(Round& round, size_t block) override {
    if (!is_root()) {
      round.receive(signature_.root, shard(block, rank()).count * element(), count_);
      return;
    }
    for (const int peer : peers()) {
      const ElementRange theirs = shard(block, static_cast<size_t>(peer));
      round.send(std::span(&peer, 1), at(theirs.offset), theirs.count * element(), count_);
    }
  }

  void post_second(Round& round, const Round& first, size_t block) override {
    const ElementRange mine = shard(block, rank());
    const size_t bytes = mine.count * element();
    if (!is_root() && bytes > 0) {
      std::memcpy(at(mine.offset), first.payload(signature_.root), bytes);
    }
    std::vector<int> others;
    for (const int peer : peers()) {
      if (peer != signature_.root) others.push_back(peer);
      if (is_root()) continue;
      const size_t theirs = shard(block, static_cast<size_t>(peer)).count;
      round.receive(peer, theirs * element(), count_);
    }
    round.send(others, at(mine.offset), bytes, count_);
  }

  void deliver(const Round& second, size_t block) override {
    if (is_root()) return;
    for (const int peer : peers()) {
      const ElementRange theirs = shard(block, static_cast<size_t>(peer));
      if (theirs.count == 0) continue;
      std::memcpy(at(theirs.offset), second.payload(peer), theirs.count * element());
    }
  }

  std::byte* const data_;
};

}  // namespace

OperationPtr MpiCommunicator::broadcast(uint64_t sequence, void* data, size_t count, Dtype dtype,
                                        int root) {
  const Signature signature{OpCode::kBroadcast, dtype, ReduceOp::kSum, root, sequence};
  if (channel_->size > 2 && count * element_size(dtype) > kFlatBytes) {
    return std::make_unique<BlockBroadcast>(channel_, signature, data, count);
  }
  std::vector<PairwiseExchange::OutgoingStream> outgoing;
  std::vector<PairwiseExchange::IncomingStream> incoming;
  if (channel_->rank == root) {
    std::vector<int> others;
    for (int r = 0; r < channel_->size; ++r) {
      if (r != root) others.push_back(r);
    }
    outgoing.push_back({{data, count}, std::move(others)});
  } else {
    incoming.push_back({{data, count}, root});
  }
  return std::make_unique<PairwiseExchange>(channel_, signature, count, std::move(outgoing),
                                            std::move(incoming), PairwiseExchange::OwnPart{});
}

OperationPtr MpiCommunicator::allgather(uint64_t sequence, Source in,
                                        const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kAllgather, dtype, ReduceOp::kSum, -1, sequence};
  std::vector<PairwiseExchange::OutgoingStream> outgoing{{in, all_but(rank, channel_->size)}};
  return std::make_unique<PairwiseExchange>(
      channel_, signature, in.count, std::move(outgoing), from_all_but(rank, outputs),
      PairwiseExchange::OwnPart{in, outputs[static_cast<size_t>(rank)]});
}

OperationPtr MpiCommunicator::gather(uint64_t sequence, Source in, const std::vector<Sink>& outputs,
                                     Dtype dtype, int root) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kGather, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    std::vector<PairwiseExchange::OutgoingStream> outgoing{{in, {root}}};
    return std::make_unique<PairwiseExchange>(channel_, signature, in.count, std::move(outgoing),
                                              std::vector<PairwiseExchange::IncomingStream>{},
                                              PairwiseExchange::OwnPart{});
  }
  return std::make_unique<PairwiseExchange>(
      channel_, signature, in.count, std::vector<PairwiseExchange::OutgoingStream>{},
      from_all_but(rank, outputs),
      PairwiseExchange::OwnPart{in, outputs[static_cast<size_t>(rank)]});
}

OperationPtr MpiCommunicator::scatter(uint64_t sequence, const std::vector<Source>& inputs,
                                      Sink out, Dtype dtype, int root) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kScatter, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    std::vector<PairwiseExchange::IncomingStream> incoming{{out, root}};
    return std::make_unique<PairwiseExchange>(channel_, signature, out.count,
                                              std::vector<PairwiseExchange::OutgoingStream>{},
                                              std::move(incoming), PairwiseExchange::OwnPart{});
  }
  return std::make_unique<PairwiseExchange>(
      channel_, signature, out.count, to_all_but(rank, inputs),
      std::vector<PairwiseExchange::IncomingStream>{},
      PairwiseExchange::OwnPart{inputs[static_cast<size_t>(rank)], out});
}

OperationPtr MpiCommunicator::alltoall(uint64_t sequence, const std::vector<Source>& inputs,
                                       const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel_->rank;
  const auto self = static_cast<size_t>(rank);
  const Signature signature{OpCode::kAlltoall, dtype, ReduceOp::kSum, -1, sequence};
  return std::make_unique<PairwiseExchange>(channel_, signature, total(inputs),
                                            to_all_but(rank, inputs), from_all_but(rank, outputs),
                                            PairwiseExchange::OwnPart{inputs[self], outputs[self]});
}

OperationPtr MpiCommunicator::barrier(uint64_t sequence) {
  const int rank = channel_->rank;
  const Signature signature{OpCode::kBarrier, Dtype::kUInt8, ReduceOp::kSum, -1, sequence};
  const std::vector<Sink> nothing(static_cast<size_t>(channel_->size));
  std::vector<PairwiseExchange::OutgoingStream> outgoing{{Source{}, all_but(rank, channel_->size)}};
  return std::make_unique<PairwiseExchange>(channel_, signature, 0, std::move(outgoing),
                                            from_all_but(rank, nothing),
                                            PairwiseExchange::OwnPart{});
}

}  // namespace hbm::mpi
