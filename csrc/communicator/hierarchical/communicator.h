// The collectives of a group that spans several nodes: allreduce by way of the nodes' leaders where
// MultiLeaderAllreduce supports it, the rest over MPI between all ranks (which has shared memory of
// its own within a node).
#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "communicator/hierarchical/multi_leader_allreduce.h"

namespace hbm::hierarchical {

// `flat`: over MPI, between all ranks.
std::shared_ptr<Communicator> make_communicator(std::shared_ptr<const NodeLayout> layout,
                                                std::shared_ptr<Communicator> flat);

}  // namespace hbm::hierarchical
