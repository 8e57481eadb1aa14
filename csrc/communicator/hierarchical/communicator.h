// The collectives of a group that spans several nodes: within each node in the memory that its
// ranks share, between nodes over MPI, so that each node's link carries no more than it must.
// send and recv go over MPI between all ranks (which has shared memory of its own within a node).
//
// Each family of operations has a file, data_movement.cpp and reductions.cpp; what they share is in
// leader_operation.h.
#pragma once

#include <memory>
#include <vector>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/mpi/communicator.h"

namespace hbm::hierarchical {

class HierarchicalCommunicator final : public mpi::MpiCommunicator {
 public:
  // `channel` is of all ranks, `layout` of the same group.
  HierarchicalCommunicator(std::shared_ptr<mpi::Channel> channel,
                           std::shared_ptr<const NodeLayout> layout);

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

  void wake() noexcept override;
  void give_up() noexcept override;
  CommunicatorMemory memory() const override;

 private:
  const std::shared_ptr<const NodeLayout> layout_;
};

}  // namespace hbm::hierarchical
