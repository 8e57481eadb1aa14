// The communicator of a group over MPI. communicator/communicator.h specifies each operation. MPI
// only moves bytes. hbm reduces them (kernels/reduce.h), so the order is fixed and every rank gets
// the same bits (docs/design/mpi.md).
//
// The operations are in data_movement.cpp, reductions.cpp and point_to_point.cpp. Making an
// operation allocates all the memory that it needs, or throws Error(kExhausted). An abandoned
// operation no longer accesses the caller's buffers.
//
// Threads: as for Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/mpi/channel.h"

namespace hbm::communicator::mpi {

class MpiCommunicator : public Communicator {
 public:
  // `channel`: of all ranks. Its MPI communicator may be null in a group of one.
  explicit MpiCommunicator(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  OperationPtr allreduce(OperationNumber sequence, const void* in, void* out, size_t count,
                         Dtype dtype, ReduceOp op) override;
  OperationPtr reduce(OperationNumber sequence, const void* in, void* out, size_t count,
                      Dtype dtype, ReduceOp op, int root) override;
  OperationPtr reduce_scatter(OperationNumber sequence, const std::vector<Source>& inputs,
                              void* out, Dtype dtype, ReduceOp op) override;
  OperationPtr broadcast(OperationNumber sequence, void* data, size_t count, Dtype dtype,
                         int root) override;
  OperationPtr allgather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                         Dtype dtype) override;
  OperationPtr gather(OperationNumber sequence, Source in, const std::vector<Sink>& outputs,
                      Dtype dtype, int root) override;
  OperationPtr scatter(OperationNumber sequence, const std::vector<Source>& inputs, Sink out,
                       Dtype dtype, int root) override;
  OperationPtr alltoall(OperationNumber sequence, const std::vector<Source>& inputs,
                        const std::vector<Sink>& outputs, Dtype dtype) override;
  OperationPtr barrier(OperationNumber sequence) override;
  OperationPtr send(Source in, Dtype dtype, int to, int tag) override;
  OperationPtr receive(Sink out, Dtype dtype, int from, int tag,
                       std::shared_ptr<int> source) override;
  int tags() const override { return channel_->communicator->user_tags(); }
  void invalidate() noexcept override {
    if (channel_->communicator) channel_->communicator->leak();
  }
  CommunicatorMemory memory() const override { return {0, sweep_orphaned()}; }

 protected:
  size_t ranks() const { return static_cast<size_t>(channel_->size); }

  const std::shared_ptr<Channel> channel_;
};

}  // namespace hbm::communicator::mpi
