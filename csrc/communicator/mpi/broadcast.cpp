// broadcast: small tensors go from the root to each rank; large ones block by block, the root
// dealing one shard to each rank (first phase) and each rank handing its own to the others (second
// phase), so that the root's link carries the data about twice, however many ranks there are. Van
// de Geijn's scheme.
#include <cstring>
#include <utility>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/exchange.h"
#include "communicator/mpi/pipeline.h"

namespace hbm::mpi {
namespace {

class BlockBroadcast final : public TwoPhase {
 public:
  BlockBroadcast(ChannelPtr channel, const Signature& signature, void* data, size_t count)
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
      const Range theirs = shard(block, static_cast<size_t>(peer));
      round.send(std::span(&peer, 1), at(theirs.offset), theirs.count * element(), count_);
    }
  }

  void post_second(Round& round, const Round& first, size_t block) override {
    const Range mine = shard(block, rank());
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
      const Range theirs = shard(block, static_cast<size_t>(peer));
      if (theirs.count == 0) continue;
      std::memcpy(at(theirs.offset), second.payload(peer), theirs.count * element());
    }
  }

  std::byte* const data_;
};

constexpr size_t kFlatBytes = 64 * 1024;  // of a message; above, the root's link is the bound

}  // namespace

std::unique_ptr<Operation> make_broadcast(ChannelPtr channel, uint64_t sequence, void* data,
                                          size_t count, Dtype dtype, int root) {
  const Signature signature{OpCode::kBroadcast, dtype, ReduceOp::kSum, root, sequence};
  if (channel->size > 2 && count * element_size(dtype) > kFlatBytes) {
    return std::make_unique<BlockBroadcast>(std::move(channel), signature, data, count);
  }
  std::vector<PairwiseExchange::Outgoing> outgoing;
  std::vector<PairwiseExchange::Incoming> incoming;
  if (channel->rank == root) {
    std::vector<int> others;
    for (int r = 0; r < channel->size; ++r) {
      if (r != root) others.push_back(r);
    }
    outgoing.push_back({{data, count}, std::move(others)});
  } else {
    incoming.push_back({{data, count}, root});
  }
  return std::make_unique<PairwiseExchange>(std::move(channel), signature, count,
                                            std::move(outgoing), std::move(incoming),
                                            PairwiseExchange::Local{});
}

}  // namespace hbm::mpi
