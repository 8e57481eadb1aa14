// The collectives of a group that spans several nodes: those that are done by way of the nodes'
// leaders are overridden here; the others go over MPI between all ranks (which has shared memory of
// its own within a node).
#pragma once

#include <memory>

#include "communicator/hierarchical/node_layout.h"
#include "communicator/mpi/communicator.h"

namespace hbm::hierarchical {

class HierarchicalCommunicator final : public mpi::MpiCommunicator {
 public:
  // `channel` is of all ranks, `layout` of the same group.
  HierarchicalCommunicator(std::shared_ptr<mpi::Channel> channel,
                           std::shared_ptr<const NodeLayout> layout);

  // Goes by the leaders where MultiLeaderAllreduce supports it, else over MPI.
  OperationPtr allreduce(uint64_t sequence, const void* in, void* out, size_t count, Dtype dtype,
                         ReduceOp op) override;

  void wake() noexcept override;
  CommunicatorMemory memory() const override;

 private:
  const std::shared_ptr<const NodeLayout> layout_;
};

}  // namespace hbm::hierarchical
