#include "communicator/shm/communicator.h"

#include <numeric>
#include <optional>
#include <utility>

#include "communicator/shm/peer_transfers.h"
#include "communicator/shm/point_to_point.h"
#include "communicator/shm/reduction.h"
#include "communicator/shm/window.h"

namespace hbm::communicator::shm {
namespace {

using Cast = PeerExchange::Cast;

size_t total(const std::vector<Source>& parts) {
  size_t count = 0;
  for (const Source& part : parts) count += part.count;
  return count;
}

class ShmCommunicator final : public Communicator {
 public:
  explicit ShmCommunicator(std::shared_ptr<ShmGroup> shm_group)
      : shm_group_(std::move(shm_group)), matcher_(std::make_shared<MessageMatcher>(shm_group_)) {}

  OperationPtr allreduce(OperationNumber sequence, const void* in, void* out, size_t count,
                         Dtype dtype, ReduceOp op) override {
    return std::make_unique<ShmReduction>(shm_group_,
                                          Signature{OpCode::kAllreduce, dtype, op, -1, sequence},
                                          ReductionBuffers{in, out, count, -1, size()});
  }

  OperationPtr reduce(OperationNumber sequence, const void* in, void* out, size_t count,
                      Dtype dtype, ReduceOp op, int root) override {
    return std::make_unique<ShmReduction>(shm_group_,
                                          Signature{OpCode::kReduce, dtype, op, root, sequence},
                                          ReductionBuffers{in, out, count, root, size()});
  }

  OperationPtr reduce_scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                              void* out, Dtype dtype, ReduceOp op) override {
    return std::make_unique<ShmReduceScatter>(
        shm_group_, Signature{OpCode::kReduceScatter, dtype, op, -1, sequence}, inputs[0].count,
        inputs, out, Combining{op, size()});
  }

  OperationPtr broadcast(OperationNumber sequence, void* data, size_t count, Dtype dtype,
                         int root) override {
    const auto from = static_cast<size_t>(root);
    std::vector<Sink> sinks(size());
    if (from != self()) sinks[from] = {data, count};
    return exchange(OpCode::kBroadcast, dtype, root, sequence, count,
                    self() == from ? to_all({data, count}) : nothing(), std::move(sinks),
                    Cast::kMulti);
  }

  OperationPtr allgather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                         Dtype dtype) override {
    return exchange(OpCode::kAllgather, dtype, -1, sequence, in.count, to_all(in), outputs,
                    Cast::kMulti);
  }

  OperationPtr gather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                      Dtype dtype, int root) override {
    std::vector<Source> sources = nothing();
    sources[static_cast<size_t>(root)] = in;
    return exchange(OpCode::kGather, dtype, root, sequence, in.count, std::move(sources),
                    outputs.empty() ? std::vector<Sink>(size()) : outputs, Cast::kUni);
  }

  OperationPtr scatter(OperationNumber sequence, const std::vector<Source>& inputs, Sink out,
                       Dtype dtype, int root) override {
    std::vector<Sink> sinks(size());
    sinks[static_cast<size_t>(root)] = out;
    return exchange(OpCode::kScatter, dtype, root, sequence, out.count,
                    inputs.empty() ? nothing() : inputs, std::move(sinks), Cast::kUni);
  }

  OperationPtr alltoall(OperationNumber sequence, const std::vector<Source>& inputs,
                        const std::vector<Sink>& outputs, Dtype dtype) override {
    return exchange(OpCode::kAlltoall, dtype, -1, sequence, total(inputs), inputs, outputs,
                    Cast::kUni);
  }

  OperationPtr barrier(OperationNumber sequence) override {
    return exchange(OpCode::kBarrier, Dtype::kUInt8, -1, sequence, 0, nothing(),
                    std::vector<Sink>(size()), Cast::kUni);
  }

  OperationPtr send(Source in, Dtype dtype, int to, int tag) override {
    return make_send(matcher_, in, dtype, static_cast<size_t>(to), tag);
  }

  OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                       std::shared_ptr<int> source) override {
    const auto local_rank =
        from == kAnyRank ? std::nullopt : std::optional<size_t>(static_cast<size_t>(from));
    return make_receive(matcher_, out, dtype, local_rank, tag, std::move(source));
  }

  int tags() const override { return kTags; }

  bool preallocates_allreduce(const void* data, size_t bytes) const noexcept override {
    return bytes < kZeroCopyReductionBytes ||
           (bytes < kZeroCopyBytes && !shm_group_->offset_in_segment(data, bytes));
  }

  progress::Operation* preallocated_allreduce(OperationNumber sequence, void* data, size_t count,
                                              Dtype dtype, ReduceOp op) override {
    return &preallocated_.emplace(shm_group_,
                                  Signature{OpCode::kAllreduce, dtype, op, -1, sequence},
                                  ReductionBuffers{data, data, count, -1, size()});
  }

  std::vector<int> memory_ranks() const override {
    std::vector<int> ranks(size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  std::shared_ptr<SharedWindow> make_window(const void* data, size_t bytes) override {
    return shm::make_window(shm_group_, data, bytes);
  }

  void wake() noexcept override { shm_group_->wake(); }

  CommunicatorMemory memory() const override { return {shm_group_->layout().total, 0}; }

 private:
  size_t size() const { return shm_group_->size(); }
  size_t self() const { return shm_group_->self(); }
  std::vector<Source> nothing() const { return std::vector<Source>(size()); }
  std::vector<Source> to_all(Source source) const { return std::vector<Source>(size(), source); }

  OperationPtr exchange(OpCode op, Dtype dtype, int root, OperationNumber sequence, size_t count,
                        std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast) {
    return std::make_unique<PeerExchange>(shm_group_,
                                          Signature{op, dtype, ReduceOp::kSum, root, sequence},
                                          count, std::move(outgoing), std::move(incoming), cast);
  }

  const std::shared_ptr<ShmGroup> shm_group_;
  const std::shared_ptr<MessageMatcher> matcher_;
  std::optional<ShmReduction> preallocated_;  // the latest result of preallocated_allreduce()
};

}  // namespace

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<ShmGroup> shm_group) {
  return std::make_shared<ShmCommunicator>(std::move(shm_group));
}

}  // namespace hbm::communicator::shm
