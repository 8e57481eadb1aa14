// The collectives over MPI that reduce. Each collective reduces an element in rank order, so all
// collectives give the same bits.
//
// allreduce and reduce of short tensors take one round: every rank that takes the result gets the
// data of all ranks, and reduces it. Longer tensors go block by block, with several blocks in
// flight. In each block every owner reduces one shard (first phase) and sends it on (second phase).
// In an allreduce all ranks are owners. In a reduce of more than two ranks all ranks except the
// root are owners, so that the root's link carries the tensor once. In a reduce of two ranks the
// root is the only owner.
//
// reduce_scatter: in each round every rank gets one chunk of its shard from all ranks, and reduces
// it. At least kLeastInFlight rounds are in flight.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "communicator/mpi/collectives.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"
#include "communicator/mpi/tuning.h"
#include "kernels/partial_sum.h"
#include "kernels/reduce.h"

namespace hbm::communicator::mpi {
namespace {

size_t result_receives(const Channel& channel, int root) {
  return root < 0 || root == channel.rank ? static_cast<size_t>(channel.size - 1) : 0;
}

const std::byte* at(const void* data, size_t elements, size_t element) {
  return static_cast<const std::byte*>(data) + elements * element;
}

std::byte* at(void* data, size_t elements, size_t element) {
  return static_cast<std::byte*>(data) + elements * element;
}

// Reduces `sources` to `out`, in the tensors' type. The sources may have a wider type.
void combine(void* out, const std::vector<const void*>& sources, size_t count,
             const Signature& signature, Combining how) {
  if (count == 0) return;
  if (signature.partial) {
    kernels::average(out, signature.dtype, sources.data(), sources.size(), count,
                     *signature.partial, how.divisor);
  } else {
    kernels::reduce(out, sources.data(), sources.size(), count, signature.dtype, how.op,
                    how.divisor);
  }
}

// Reduces `own` and the payloads of `round`, in rank order.
void reduce_round(void* out, const void* own, const Round& round, const Channel& channel,
                  size_t count, const Signature& signature, Combining how) {
  std::vector<const void*> sources;
  for (int r = 0; r < channel.size; ++r) {
    sources.push_back(r == channel.rank ? own : round.payload(r));
  }
  combine(out, sources, count, signature, how);
}

class OneShotReduction final : public GroupOperation {
 public:
  OneShotReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                   const Reduction& reduction);

  void begin() override;
  progress::Progress poll() override;
  std::vector<int> missing() const override { return round_.missing(); }
  std::vector<int> needed() const override { return round_.needed(); }
  void abandon() noexcept override { round_.abandon(); }
  bool self_sufficient() const override { return bytes() <= kEagerBytes; }

 private:
  size_t bytes() const { return reduction_.count * element(); }
  bool takes_result() const { return reduction_.root < 0 || reduction_.root == channel_->rank; }

  const Reduction reduction_;
  Round round_;
};

class BlockReduction final : public TwoPhase {
 public:
  BlockReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                 const Reduction& reduction, const std::vector<int>& owners);

 private:
  static Room first_room(const Channel& channel, const std::vector<int>& owners) {
    const bool owner = std::binary_search(owners.begin(), owners.end(), channel.rank);
    return {owners.size() - (owner ? 1 : 0), owner ? static_cast<size_t>(channel.size - 1) : 0};
  }
  static Room second_room(const Channel& channel, int root, const std::vector<int>& owners) {
    const bool owner = std::binary_search(owners.begin(), owners.end(), channel.rank);
    const bool takes = root < 0 || root == channel.rank;
    return {owner ? size_t{1} : 0, takes ? owners.size() - (owner ? 1 : 0) : 0};
  }

  bool takes_result() const { return reduction_.root < 0 || reduction_.root == channel_->rank; }
  size_t result_element() const { return element_size(signature_.dtype); }
  void post_first(Round& round, size_t block) override;
  void post_second(Round& round, const Round& first, size_t block) override;
  void deliver(const Round& second, size_t block) override;

  const Reduction reduction_;
};

OneShotReduction::OneShotReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                                   const Reduction& reduction)
    : GroupOperation(std::move(channel), signature, reduction.reported),
      reduction_(reduction),
      round_(channel_, 1, result_receives(*channel_, reduction.root), reduction.count * element()) {
  observed_.staged = bytes() > 0 && size() > 1;
}

void OneShotReduction::begin() {
  round_.open(signature_, 0, 0);
  if (takes_result()) {
    for (const int peer : peers()) round_.receive(peer, bytes(), reduction_.reported);
  }
  const std::vector<int> to = reduction_.root < 0 ? peers()
                              : reduction_.root == channel_->rank
                                  ? std::vector<int>{}
                                  : std::vector<int>{reduction_.root};
  round_.send(to, reduction_.in, bytes(), reduction_.reported);
}

progress::Progress OneShotReduction::poll() {
  const progress::Progress progress = round_.poll();
  if (progress == progress::Progress::kDone && takes_result()) {
    reduce_round(reduction_.out, reduction_.in, round_, *channel_, reduction_.count, signature_,
                 reduction_.how);
  }
  return progress;
}

std::vector<int> owners_of(const Channel& channel, int root) {
  if (root >= 0 && channel.size == 2) return {root};
  std::vector<int> owners(static_cast<size_t>(channel.size));
  std::iota(owners.begin(), owners.end(), 0);
  if (root >= 0) std::erase(owners, root);
  return owners;
}

BlockReduction::BlockReduction(std::shared_ptr<Channel> channel, const Signature& signature,
                               const Reduction& reduction, const std::vector<int>& owners)
    : TwoPhase(channel, signature, reduction.count, reduction.reported, owners,
               first_room(*channel, owners), second_room(*channel, reduction.root, owners)),
      reduction_(reduction) {}

void BlockReduction::post_first(Round& round, size_t block) {
  if (owns()) {
    const size_t mine = shard(block, channel_->rank).count;
    for (const int peer : peers()) round.receive(peer, mine * element(), count_);
  }
  for (const int owner : other_owners()) {
    const ElementRange theirs = shard(block, owner);
    round.send(std::span(&owner, 1), at(reduction_.in, theirs.offset, element()),
               theirs.count * element(), count_);
  }
}

void BlockReduction::post_second(Round& round, const Round& first, size_t block) {
  if (takes_result()) {
    for (const int owner : other_owners()) {
      round.receive(owner, shard(block, owner).count * result_element(), count_);
    }
  }
  if (!owns()) return;
  const ElementRange mine = shard(block, channel_->rank);
  const size_t bytes = mine.count * result_element();
  std::byte* result = round.buffer();
  reduce_round(result, at(reduction_.in, mine.offset, element()), first, *channel_, mine.count,
               signature_, reduction_.how);
  if (takes_result() && bytes > 0) {
    std::memcpy(at(reduction_.out, mine.offset, result_element()), result, bytes);
  }
  if (reduction_.root < 0) {
    round.post(peers(), bytes, count_);
  } else if (!takes_result()) {
    round.post(std::span(&reduction_.root, 1), bytes, count_);
  }
}

void BlockReduction::deliver(const Round& second, size_t block) {
  if (!takes_result()) return;
  for (const int owner : other_owners()) {
    const ElementRange theirs = shard(block, owner);
    if (theirs.count == 0) continue;
    std::memcpy(at(reduction_.out, theirs.offset, result_element()), second.payload(owner),
                theirs.count * result_element());
  }
}

class MpiReduceScatter final : public Pipeline {
 public:
  MpiReduceScatter(std::shared_ptr<Channel> channel, const Signature& signature,
                   std::vector<Source> inputs, void* out, Combining how,
                   std::vector<size_t> reported)
      : Pipeline(std::move(channel), signature, reported[0]),
        inputs_(std::move(inputs)),
        reported_(std::move(reported)),
        out_(static_cast<std::byte*>(out)),
        how_(how),
        chunk_(channel_->chunk_bytes / element()) {
    for (const Source& input : inputs_) longest_ = std::max(longest_, input.count);
    prepare(parts_of(longest_), size() - 1, size() - 1, std::min(longest_, chunk_) * element());
  }

  bool self_sufficient() const override {
    return parts() == 1 && longest_ * element() <= kEagerBytes;
  }

 private:
  size_t parts_of(size_t count) const { return std::max<size_t>(1, (count + chunk_ - 1) / chunk_); }

  size_t part_count(size_t part, size_t count) const {
    return std::min(chunk_, count - part * chunk_);
  }

  const std::byte* from(size_t part, size_t shard) const {
    return static_cast<const std::byte*>(inputs_[shard].data) + part * chunk_ * element();
  }

  void post(Round& round, size_t part) override {
    const size_t mine = inputs_[rank()].count;
    for (const int peer : peers()) {
      if (part >= parts_of(mine)) continue;
      round.receive(peer, part_count(part, mine) * element(), reported_[rank()]);
    }
    for (const int peer : peers()) {
      const auto shard = static_cast<size_t>(peer);
      const size_t theirs = inputs_[shard].count;
      if (part >= parts_of(theirs)) continue;
      round.send(std::span(&peer, 1), from(part, shard), part_count(part, theirs) * element(),
                 reported_[shard]);
    }
  }

  void deliver(const Round& round, size_t part) override {
    const size_t mine = inputs_[rank()].count;
    if (part >= parts_of(mine) || mine == 0) return;
    std::vector<const void*> sources;
    for (size_t r = 0; r < size(); ++r) {
      sources.push_back(r == rank() ? from(part, r) : round.payload(static_cast<int>(r)));
    }
    combine(out_ + part * chunk_ * element_size(signature_.dtype), sources, part_count(part, mine),
            signature_, how_);
  }

  const std::vector<Source> inputs_;
  const std::vector<size_t> reported_;
  std::byte* const out_;
  const Combining how_;
  const size_t chunk_;  // elements of a message
  size_t longest_ = 0;  // elements of the longest shard
};

std::vector<size_t> counts(const std::vector<Source>& inputs) {
  std::vector<size_t> each;
  for (const Source& input : inputs) each.push_back(input.count);
  return each;
}

}  // namespace

OperationPtr make_reduction(std::shared_ptr<Channel> channel, const Signature& signature,
                            const Reduction& reduction) {
  const size_t bytes = reduction.count * element_size(signature.operands());
  const auto peers = static_cast<size_t>(channel->size - 1);
  if (bytes <= kOneShotBytesPerPeer || bytes * peers <= kOneShotTotalBytes || peers == 0) {
    return std::make_unique<OneShotReduction>(std::move(channel), signature, reduction);
  }
  const std::vector<int> owners = owners_of(*channel, reduction.root);
  return std::make_unique<BlockReduction>(std::move(channel), signature, reduction, owners);
}

OperationPtr make_reduce_scatter(std::shared_ptr<Channel> channel, const Signature& signature,
                                 std::vector<Source> inputs, void* out, Combining how,
                                 std::vector<size_t> reported) {
  return std::make_unique<MpiReduceScatter>(std::move(channel), signature, std::move(inputs), out,
                                            how, std::move(reported));
}

OperationPtr MpiCommunicator::allreduce(OperationNumber sequence, const void* in, void* out,
                                        size_t count, Dtype dtype, ReduceOp op) {
  return make_reduction(channel_, {OpCode::kAllreduce, dtype, op, -1, sequence},
                        {in, out, count, -1, {op, ranks()}, count});
}

OperationPtr MpiCommunicator::reduce(OperationNumber sequence, const void* in, void* out,
                                     size_t count, Dtype dtype, ReduceOp op, int root) {
  return make_reduction(channel_, {OpCode::kReduce, dtype, op, root, sequence},
                        {in, out, count, root, {op, ranks()}, count});
}

OperationPtr MpiCommunicator::reduce_scatter(OperationNumber sequence,
                                             const std::vector<Source>& inputs, void* out,
                                             Dtype dtype, ReduceOp op) {
  const Signature signature{OpCode::kReduceScatter, dtype, op, -1, sequence};
  return make_reduce_scatter(channel_, signature, inputs, out, {op, ranks()}, counts(inputs));
}

}  // namespace hbm::communicator::mpi
