// The collectives within a node (communicator/communicator.h says what each does), over the memory
// that its ranks share.
//
// The ranks that callers name are indices of the ShmGroup's members; when the whole group is on
// this node they are the group's ranks.
#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "communicator/shm/shm_group.h"

namespace hbm::shm {

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<ShmGroup> shm_group);

}  // namespace hbm::shm
