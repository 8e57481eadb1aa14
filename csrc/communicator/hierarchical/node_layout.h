// The nodes of a group, with the ranks and the leaders of each node.
//
// Threads: constant after make_node_layout().
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/connect.h"
#include "communicator/shm/shm_group.h"

namespace hbm::communicator::hierarchical {

// The nodes, as one rank sees them. Each node has as many leaders as the smallest node has ranks:
// the ranks with the lowest local ranks.
struct NodeLayout {
  std::shared_ptr<shm::ShmGroup> shm_group;  // of this node
  // The group ranks of each node, by local rank; nodes in the order of their first ranks.
  std::vector<std::vector<int>> nodes;
  size_t node;              // this rank's node
  size_t leaders;           // of each node
  size_t most_local_ranks;  // the ranks of the largest node
  size_t chunk_bytes;       // payload of the largest message, as in the group's channel
  std::shared_ptr<memory::StagingPool> staging;
  // Ends this rank's sleep when a message from another node arrives; null if nothing can do that.
  std::shared_ptr<mpi::Arrivals> arrivals;
  // The rail of this rank: the leaders with its local rank on all nodes, in the order of nodes; a
  // channel for each tag range. Empty if this rank is no leader.
  std::vector<std::shared_ptr<mpi::Channel>> rail;

  size_t local_rank() const { return shm_group->self(); }
  size_t local_size() const { return shm_group->size(); }
  bool one_each() const { return most_local_ranks == 1; }
  size_t ranks() const;

  // Return the node and the local rank of a group rank.
  size_t node_of(int rank) const;
  size_t local_rank_of(int rank) const;
};

// Makes the layout of a connected group. All its ranks call it. `node_of`: the node of each rank.
// `channel`: of the group. Throws as mpi::connect_some().
std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel);

}  // namespace hbm::communicator::hierarchical
