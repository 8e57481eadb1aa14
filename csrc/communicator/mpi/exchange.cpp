#include "communicator/mpi/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hbm::mpi {

PairwiseExchange::PairwiseExchange(std::shared_ptr<Channel> channel, const Signature& signature,
                                   size_t count, std::vector<Outgoing> outgoing,
                                   std::vector<Incoming> incoming, Local local)
    : Pipeline(std::move(channel), signature, count),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      local_(local),
      chunk_(channel_->chunk_bytes / element()) {
  for (const Outgoing& stream : outgoing_) longest_ = std::max(longest_, stream.source.count);
  for (const Incoming& stream : incoming_) longest_ = std::max(longest_, stream.sink.count);
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
  for (const Incoming& stream : incoming_) {
    if (part >= parts_of(stream.sink.count)) continue;
    round.receive(stream.peer, part_count(part, stream.sink.count) * element(), stream.sink.count);
  }
  for (const Outgoing& stream : outgoing_) {
    if (part >= parts_of(stream.source.count)) continue;
    const auto* from =
        static_cast<const std::byte*>(stream.source.data) + part * chunk_ * element();
    round.send(stream.peers, from, part_count(part, stream.source.count) * element(),
               stream.source.count);
  }
}

void PairwiseExchange::deliver(const Round& round, size_t part) {
  for (const Incoming& stream : incoming_) {
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

namespace {

size_t total(const std::vector<Source>& parts) {
  size_t count = 0;
  for (const Source& part : parts) count += part.count;
  return count;
}

std::vector<PairwiseExchange::Incoming> from_all_but(int rank, const std::vector<Sink>& outputs) {
  std::vector<PairwiseExchange::Incoming> incoming;
  for (int peer = 0; peer < static_cast<int>(outputs.size()); ++peer) {
    if (peer != rank) incoming.push_back({outputs[static_cast<size_t>(peer)], peer});
  }
  return incoming;
}

std::vector<PairwiseExchange::Outgoing> to_all_but(int rank, const std::vector<Source>& inputs) {
  std::vector<PairwiseExchange::Outgoing> outgoing;
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

}  // namespace

std::unique_ptr<Operation> make_allgather(ChannelPtr channel, uint64_t sequence, Source in,
                                          const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel->rank;
  const Signature signature{OpCode::kAllgather, dtype, ReduceOp::kSum, -1, sequence};
  std::vector<PairwiseExchange::Outgoing> outgoing{{in, all_but(rank, channel->size)}};
  return std::make_unique<PairwiseExchange>(
      std::move(channel), signature, in.count, std::move(outgoing), from_all_but(rank, outputs),
      PairwiseExchange::Local{in, outputs[static_cast<size_t>(rank)]});
}

std::unique_ptr<Operation> make_gather(ChannelPtr channel, uint64_t sequence, Source in,
                                       const std::vector<Sink>& outputs, Dtype dtype, int root) {
  const int rank = channel->rank;
  const Signature signature{OpCode::kGather, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    std::vector<PairwiseExchange::Outgoing> outgoing{{in, {root}}};
    return std::make_unique<PairwiseExchange>(
        std::move(channel), signature, in.count, std::move(outgoing),
        std::vector<PairwiseExchange::Incoming>{}, PairwiseExchange::Local{});
  }
  return std::make_unique<PairwiseExchange>(
      std::move(channel), signature, in.count, std::vector<PairwiseExchange::Outgoing>{},
      from_all_but(rank, outputs), PairwiseExchange::Local{in, outputs[static_cast<size_t>(rank)]});
}

std::unique_ptr<Operation> make_scatter(ChannelPtr channel, uint64_t sequence,
                                        const std::vector<Source>& inputs, Sink out, Dtype dtype,
                                        int root) {
  const int rank = channel->rank;
  const Signature signature{OpCode::kScatter, dtype, ReduceOp::kSum, root, sequence};
  if (rank != root) {
    std::vector<PairwiseExchange::Incoming> incoming{{out, root}};
    return std::make_unique<PairwiseExchange>(std::move(channel), signature, out.count,
                                              std::vector<PairwiseExchange::Outgoing>{},
                                              std::move(incoming), PairwiseExchange::Local{});
  }
  return std::make_unique<PairwiseExchange>(
      std::move(channel), signature, out.count, to_all_but(rank, inputs),
      std::vector<PairwiseExchange::Incoming>{},
      PairwiseExchange::Local{inputs[static_cast<size_t>(rank)], out});
}

std::unique_ptr<Operation> make_alltoall(ChannelPtr channel, uint64_t sequence,
                                         const std::vector<Source>& inputs,
                                         const std::vector<Sink>& outputs, Dtype dtype) {
  const int rank = channel->rank;
  const auto self = static_cast<size_t>(rank);
  const Signature signature{OpCode::kAlltoall, dtype, ReduceOp::kSum, -1, sequence};
  return std::make_unique<PairwiseExchange>(std::move(channel), signature, total(inputs),
                                            to_all_but(rank, inputs), from_all_but(rank, outputs),
                                            PairwiseExchange::Local{inputs[self], outputs[self]});
}

std::unique_ptr<Operation> make_barrier(ChannelPtr channel, uint64_t sequence) {
  const int rank = channel->rank;
  const Signature signature{OpCode::kBarrier, Dtype::kUInt8, ReduceOp::kSum, -1, sequence};
  const std::vector<Sink> nothing(static_cast<size_t>(channel->size));
  std::vector<PairwiseExchange::Outgoing> outgoing{{Source{}, all_but(rank, channel->size)}};
  return std::make_unique<PairwiseExchange>(std::move(channel), signature, 0, std::move(outgoing),
                                            from_all_but(rank, nothing), PairwiseExchange::Local{});
}

}  // namespace hbm::mpi
