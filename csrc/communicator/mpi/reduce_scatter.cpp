// reduce_scatter: in each round every rank gets one chunk of its own shard from everybody, and
// reduces it in rank order. Two rounds in flight.
#include <algorithm>
#include <utility>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"
#include "kernels/reduce.h"

namespace hbm::mpi {
namespace {

class MpiReduceScatter final : public Pipeline {
 public:
  MpiReduceScatter(ChannelPtr channel, const Signature& signature, std::vector<Source> inputs,
                   void* out)
      : Pipeline(std::move(channel), signature, inputs[0].count),
        inputs_(std::move(inputs)),
        out_(static_cast<std::byte*>(out)),
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
      if (part < parts_of(mine)) round.receive(peer, part_count(part, mine) * element(), mine);
    }
    for (const int peer : peers()) {
      const auto shard = static_cast<size_t>(peer);
      const size_t theirs = inputs_[shard].count;
      if (part >= parts_of(theirs)) continue;
      round.send(std::span(&peer, 1), from(part, shard), part_count(part, theirs) * element(),
                 theirs);
    }
  }

  void deliver(const Round& round, size_t part) override {
    const size_t mine = inputs_[rank()].count;
    if (part >= parts_of(mine) || mine == 0) return;
    std::vector<const void*> sources;
    for (size_t r = 0; r < size(); ++r) {
      sources.push_back(r == rank() ? from(part, r) : round.payload(static_cast<int>(r)));
    }
    reduce(out_ + part * chunk_ * element(), sources.data(), size(), part_count(part, mine),
           signature_.dtype, signature_.reduce_op, size());
  }

  const std::vector<Source> inputs_;
  std::byte* const out_;
  const size_t chunk_;  // elements a message
  size_t longest_ = 0;  // elements of the longest shard
};

}  // namespace

std::unique_ptr<Operation> make_reduce_scatter(ChannelPtr channel, uint64_t sequence,
                                               const std::vector<Source>& inputs, void* out,
                                               Dtype dtype, ReduceOp op) {
  const Signature signature{OpCode::kReduceScatter, dtype, op, -1, sequence};
  return std::make_unique<MpiReduceScatter>(std::move(channel), signature, inputs, out);
}

}  // namespace hbm::mpi
