#include "communicator/mpi/communicator.h"

#include <utility>

#include "communicator/mpi/point_to_point.h"

namespace hbm::mpi {
namespace {

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(ChannelPtr channel) : channel_(std::move(channel)) {}

  OperationPtr allreduce(uint64_t sequence, const void* in, void* out, size_t count, Dtype dtype,
                         ReduceOp op) override {
    return make_allreduce(channel_, sequence, in, out, count, dtype, op);
  }
  OperationPtr reduce(uint64_t sequence, const void* in, void* out, size_t count, Dtype dtype,
                      ReduceOp op, int root) override {
    return make_reduce(channel_, sequence, in, out, count, dtype, op, root);
  }
  OperationPtr reduce_scatter(uint64_t sequence, const std::vector<Source>& inputs, void* out,
                              Dtype dtype, ReduceOp op) override {
    return make_reduce_scatter(channel_, sequence, inputs, out, dtype, op);
  }
  OperationPtr broadcast(uint64_t sequence, void* data, size_t count, Dtype dtype,
                         int root) override {
    return make_broadcast(channel_, sequence, data, count, dtype, root);
  }
  OperationPtr allgather(uint64_t sequence, Source in, const std::vector<Sink>& outputs,
                         Dtype dtype) override {
    return make_allgather(channel_, sequence, in, outputs, dtype);
  }
  OperationPtr gather(uint64_t sequence, Source in, const std::vector<Sink>& outputs, Dtype dtype,
                      int root) override {
    return make_gather(channel_, sequence, in, outputs, dtype, root);
  }
  OperationPtr scatter(uint64_t sequence, const std::vector<Source>& inputs, Sink out, Dtype dtype,
                       int root) override {
    return make_scatter(channel_, sequence, inputs, out, dtype, root);
  }
  OperationPtr alltoall(uint64_t sequence, const std::vector<Source>& inputs,
                        const std::vector<Sink>& outputs, Dtype dtype) override {
    return make_alltoall(channel_, sequence, inputs, outputs, dtype);
  }
  OperationPtr barrier(uint64_t sequence) override { return make_barrier(channel_, sequence); }
  OperationPtr send(Source in, Dtype dtype, int to, int tag) override {
    return make_send(channel_, in, dtype, to, tag);
  }
  OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                       std::shared_ptr<int> source) override {
    return make_receive(channel_, out, dtype, from, tag, std::move(source));
  }
  int tags() const override { return channel_->communicator->user_tags(); }

 private:
  const ChannelPtr channel_;
};

}  // namespace

std::shared_ptr<Communicator> make_communicator(ChannelPtr channel) {
  return std::make_shared<MpiCommunicator>(std::move(channel));
}

}  // namespace hbm::mpi
