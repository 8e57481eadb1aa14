// The collectives of a group that spans several nodes: allreduce by way of the nodes' leaders where
// MultiLeaderAllreduce supports it, the rest over MPI between all ranks (which has shared memory of
// its own within a node).
#pragma once

#include <memory>

#include "communicator/hierarchical/multi_leader_allreduce.h"
#include "communicator/communicator.h"

namespace hbm::cluster {

// `flat`: over MPI, between all ranks.
std::shared_ptr<Collectives> make_collectives(std::shared_ptr<const Fabric> fabric,
                                              std::shared_ptr<Collectives> flat);

}  // namespace hbm::cluster
