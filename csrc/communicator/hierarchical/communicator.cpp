#include "communicator/hierarchical/communicator.h"

#include <utility>

namespace hbm::communicator::hierarchical {

HierarchicalCommunicator::HierarchicalCommunicator(std::shared_ptr<mpi::Channel> channel,
                                                   std::shared_ptr<const NodeLayout> layout)
    : MpiCommunicator(std::move(channel)), layout_(std::move(layout)) {}

std::vector<int> HierarchicalCommunicator::memory_ranks() const {
  return layout_->nodes[layout_->node];
}

void HierarchicalCommunicator::wake() noexcept { layout_->shm_group->wake(); }

void HierarchicalCommunicator::invalidate() noexcept {
  MpiCommunicator::invalidate();
  for (const std::shared_ptr<mpi::Channel>& channel : layout_->rail) channel->communicator->leak();
}

CommunicatorMemory HierarchicalCommunicator::memory() const {
  CommunicatorMemory memory = MpiCommunicator::memory();
  memory.slots_bytes = layout_->shm_group->layout().total;
  return memory;
}

}  // namespace hbm::communicator::hierarchical
