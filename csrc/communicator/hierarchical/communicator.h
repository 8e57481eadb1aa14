// The communicator of a group that spans several nodes. Collectives use shared memory within each
// node and MPI between nodes. So the link of each node carries no more data than necessary. send
// and recv use MPI between all ranks. Within a node, MPI itself uses shared memory.
//
// The operations are in data_movement.cpp and reductions.cpp. Their base class is in
// leader_operation.h.
//
// Threads: as for Communicator.
#pragma once

#include <memory>
#include <vector>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/mpi/communicator.h"

namespace hbm::communicator::hierarchical {

class HierarchicalCommunicator final : public mpi::MpiCommunicator {
 public:
  // `channel`: of all ranks of the group. `layout`: of the same group.
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

  std::vector<int> memory_ranks() const override;
  void wake() noexcept override;
  void invalidate() noexcept override;
  CommunicatorMemory memory() const override;

 private:
  const std::shared_ptr<const NodeLayout> layout_;
};

}  // namespace hbm::communicator::hierarchical
