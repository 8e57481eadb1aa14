// How the ranks of a group lie on nodes, and who speaks for a node.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/connect.h"
#include "communicator/shm/shm_group.h"

namespace hbm::hierarchical {

// The nodes as a rank sees them. Every node has as many leaders as the smallest node has ranks: its
// first members.
struct NodeLayout {
  std::shared_ptr<shm::ShmGroup> shm_group;  // of this node
  size_t leaders;                            // of each node
  // The leaders that stand at this rank's place on their nodes; null: not a leader.
  std::shared_ptr<mpi::MpiCommunicator> column;
  std::vector<int> column_ranks;  // their ranks in the group
};

// The layout of a group that is connected. All its ranks call it; `channel` is the group's.
std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel);

}  // namespace hbm::hierarchical
