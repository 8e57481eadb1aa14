#include "communicator/mpi/reduction.h"

#include <cstring>
#include <utility>

#include "communicator/mpi/communicator.h"
#include "kernels/reduce.h"

namespace hbm::mpi {
namespace {

// Up to here one round of whole tensors beats two phases of shards.
constexpr size_t kOneShotBytes = 4096;       // to each peer
constexpr size_t kOneShotTotal = 64 * 1024;  // to all peers

size_t result_receives(const Channel& channel, int root) {
  return root < 0 || root == channel.rank ? static_cast<size_t>(channel.size - 1) : 0;
}

const std::byte* at(const void* data, size_t elements, size_t element) {
  return static_cast<const std::byte*>(data) + elements * element;
}

std::byte* at(void* data, size_t elements, size_t element) {
  return static_cast<std::byte*>(data) + elements * element;
}

// Reduces `own` and what the peers sent in `round`, in rank order.
void reduce_round(void* out, const void* own, const Round& round, const Channel& channel,
                  size_t count, const Signature& signature) {
  std::vector<const void*> sources;
  for (int r = 0; r < channel.size; ++r) {
    sources.push_back(r == channel.rank ? own : round.payload(r));
  }
  if (count > 0) {
    const auto divisor =
        channel.averaged > 0 ? static_cast<size_t>(channel.averaged) : sources.size();
    reduce(out, sources.data(), sources.size(), count, signature.dtype, signature.reduce_op,
           divisor);
  }
}

}  // namespace

OneShotReduction::OneShotReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                                   const MpiReduction& reduction)
    : GroupOperation(std::move(channel), signature, reduction.count),
      reduction_(reduction),
      round_(channel_, 1, result_receives(*channel_, reduction.root), reduction.count * element()) {
}

void OneShotReduction::begin() {
  round_.open(signature_, 0, 0);
  if (takes_result()) {
    for (const int peer : peers()) round_.receive(peer, bytes(), reduction_.count);
  }
  const std::vector<int> to = reduction_.root < 0 ? peers()
                              : reduction_.root == channel_->rank
                                  ? std::vector<int>{}
                                  : std::vector<int>{reduction_.root};
  round_.send(to, reduction_.in, bytes(), reduction_.count);
}

Progress OneShotReduction::poll() {
  const Progress progress = round_.poll();
  if (progress == Progress::kDone && takes_result()) {
    reduce_round(reduction_.out, reduction_.in, round_, *channel_, reduction_.count, signature_);
  }
  return progress;
}

BlockReduction::BlockReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                               const MpiReduction& reduction)
    : TwoPhase(channel, signature, reduction.count,
               {static_cast<size_t>(channel->size - 1), static_cast<size_t>(channel->size - 1)},
               {1, result_receives(*channel, reduction.root)}),
      reduction_(reduction) {}

void BlockReduction::post_first(Round& round, size_t block) {
  const size_t mine = shard(block, rank()).count;
  for (const int peer : peers()) round.receive(peer, mine * element(), count_);
  for (const int peer : peers()) {
    const Range theirs = shard(block, static_cast<size_t>(peer));
    round.send(std::span(&peer, 1), at(reduction_.in, theirs.offset, element()),
               theirs.count * element(), count_);
  }
}

void BlockReduction::post_second(Round& round, const Round& first, size_t block) {
  const Range mine = shard(block, rank());
  const size_t bytes = mine.count * element();
  std::byte* result = round.slot();
  reduce_round(result, at(reduction_.in, mine.offset, element()), first, *channel_, mine.count,
               signature_);
  if (takes_result()) {
    if (bytes > 0) std::memcpy(at(reduction_.out, mine.offset, element()), result, bytes);
    for (const int peer : peers()) {
      round.receive(peer, shard(block, static_cast<size_t>(peer)).count * element(), count_);
    }
  }
  if (reduction_.root < 0) {
    round.post(peers(), bytes, count_);
  } else if (!takes_result()) {
    round.post(std::span(&reduction_.root, 1), bytes, count_);
  }
}

void BlockReduction::deliver(const Round& second, size_t block) {
  if (!takes_result()) return;
  for (const int peer : peers()) {
    const Range theirs = shard(block, static_cast<size_t>(peer));
    if (theirs.count == 0) continue;
    std::memcpy(at(reduction_.out, theirs.offset, element()), second.payload(peer),
                theirs.count * element());
  }
}

namespace {

std::unique_ptr<Operation> make_reduction(ChannelPtr channel, const Signature& signature,
                                          const MpiReduction& reduction) {
  const size_t bytes = reduction.count * element_size(signature.dtype);
  const auto peers = static_cast<size_t>(channel->size - 1);
  if (bytes <= kOneShotBytes || bytes * peers <= kOneShotTotal || peers == 0) {
    return std::make_unique<OneShotReduction>(std::move(channel), signature, reduction);
  }
  return std::make_unique<BlockReduction>(std::move(channel), signature, reduction);
}

}  // namespace

std::unique_ptr<Operation> make_allreduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                          void* out, size_t count, Dtype dtype, ReduceOp op) {
  return make_reduction(std::move(channel), {OpCode::kAllreduce, dtype, op, -1, sequence},
                        {in, out, count, -1});
}

std::unique_ptr<Operation> make_reduce(ChannelPtr channel, uint64_t sequence, const void* in,
                                       void* out, size_t count, Dtype dtype, ReduceOp op,
                                       int root) {
  return make_reduction(std::move(channel), {OpCode::kReduce, dtype, op, root, sequence},
                        {in, out, count, root});
}

}  // namespace hbm::mpi
