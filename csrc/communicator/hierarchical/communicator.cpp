#include "communicator/hierarchical/communicator.h"

#include <utility>

namespace hbm::hierarchical {
namespace {

class HierarchicalCommunicator final : public Communicator {
 public:
  HierarchicalCommunicator(std::shared_ptr<const NodeLayout> layout,
                           std::shared_ptr<Communicator> flat)
      : layout_(std::move(layout)), flat_(std::move(flat)) {}

  OperationPtr allreduce(uint64_t sequence, const void* in, void* out, size_t count, Dtype dtype,
                         ReduceOp op) override {
    if (in != out || !MultiLeaderAllreduce::supports(dtype, op)) {
      return flat_->allreduce(sequence, in, out, count, dtype, op);
    }
    return std::make_unique<MultiLeaderAllreduce>(
        layout_, Signature{OpCode::kAllreduce, dtype, op, -1, sequence}, out, count);
  }
  OperationPtr reduce(uint64_t sequence, const void* in, void* out, size_t count, Dtype dtype,
                      ReduceOp op, int root) override {
    return flat_->reduce(sequence, in, out, count, dtype, op, root);
  }
  OperationPtr reduce_scatter(uint64_t sequence, const std::vector<Source>& inputs, void* out,
                              Dtype dtype, ReduceOp op) override {
    return flat_->reduce_scatter(sequence, inputs, out, dtype, op);
  }
  OperationPtr broadcast(uint64_t sequence, void* data, size_t count, Dtype dtype,
                         int root) override {
    return flat_->broadcast(sequence, data, count, dtype, root);
  }
  OperationPtr allgather(uint64_t sequence, Source in, const std::vector<Sink>& outputs,
                         Dtype dtype) override {
    return flat_->allgather(sequence, in, outputs, dtype);
  }
  OperationPtr gather(uint64_t sequence, Source in, const std::vector<Sink>& outputs, Dtype dtype,
                      int root) override {
    return flat_->gather(sequence, in, outputs, dtype, root);
  }
  OperationPtr scatter(uint64_t sequence, const std::vector<Source>& inputs, Sink out, Dtype dtype,
                       int root) override {
    return flat_->scatter(sequence, inputs, out, dtype, root);
  }
  OperationPtr alltoall(uint64_t sequence, const std::vector<Source>& inputs,
                        const std::vector<Sink>& outputs, Dtype dtype) override {
    return flat_->alltoall(sequence, inputs, outputs, dtype);
  }
  OperationPtr barrier(uint64_t sequence) override { return flat_->barrier(sequence); }
  OperationPtr send(Source in, Dtype dtype, int to, int tag) override {
    return flat_->send(in, dtype, to, tag);
  }
  OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                       std::shared_ptr<int> source) override {
    return flat_->receive(out, dtype, from, tag, std::move(source));
  }
  int tags() const override { return flat_->tags(); }

 private:
  const std::shared_ptr<const NodeLayout> layout_;
  const std::shared_ptr<Communicator> flat_;
};

}  // namespace

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<const NodeLayout> layout,
                                                std::shared_ptr<Communicator> flat) {
  return std::make_shared<HierarchicalCommunicator>(std::move(layout), std::move(flat));
}

}  // namespace hbm::hierarchical
