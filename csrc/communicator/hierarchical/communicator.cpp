#include "communicator/hierarchical/communicator.h"

#include <utility>

#include "communicator/hierarchical/multi_leader_allreduce.h"

namespace hbm::hierarchical {

HierarchicalCommunicator::HierarchicalCommunicator(std::shared_ptr<mpi::Channel> channel,
                                                   std::shared_ptr<const NodeLayout> layout)
    : MpiCommunicator(std::move(channel)), layout_(std::move(layout)) {}

OperationPtr HierarchicalCommunicator::allreduce(uint64_t sequence, const void* in, void* out,
                                                 size_t count, Dtype dtype, ReduceOp op) {
  if (in != out || !MultiLeaderAllreduce::supports(dtype, op)) {
    return MpiCommunicator::allreduce(sequence, in, out, count, dtype, op);
  }
  return std::make_unique<MultiLeaderAllreduce>(
      layout_, Signature{OpCode::kAllreduce, dtype, op, -1, sequence}, out, count);
}

void HierarchicalCommunicator::wake() noexcept { layout_->shm_group->wake(); }

CommunicatorMemory HierarchicalCommunicator::memory() const {
  CommunicatorMemory memory = MpiCommunicator::memory();
  memory.slots_bytes = layout_->shm_group->layout().total;
  return memory;
}

}  // namespace hbm::hierarchical
