// The communicator of the ranks of one node, over the memory that they share.
// communicator/communicator.h specifies each operation.
//
// The ranks in calls are local ranks. If the whole group is on this node, local ranks and group
// ranks are equal.
#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/shm_group.h"

namespace hbm::communicator::shm {

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<ShmGroup> shm_group);

}  // namespace hbm::communicator::shm
