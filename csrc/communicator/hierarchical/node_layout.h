// How the ranks of a group lie on nodes, and who speaks for a node.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/connect.h"
#include "communicator/shm/shm_group.h"

namespace hbm::hierarchical {

// The nodes as a rank sees them. Every node has as many leaders as the smallest node has ranks: its
// first members. A place is the index of a rank on its node.
struct NodeLayout {
  std::shared_ptr<shm::ShmGroup> shm_group;  // of this node
  std::vector<std::vector<int>> nodes;       // the ranks of each, by place; the nodes in the order
                                             // of their first ranks
  size_t node;                               // this rank's
  size_t leaders;                            // of each node
  size_t most_members;                       // of a node
  size_t chunk_bytes;                        // of the group's channel
  std::shared_ptr<memory::StagingPool> staging;
  std::shared_ptr<mpi::Arrivals> arrivals;  // from other nodes; null: nothing tells of them
  // The column of this rank: the leaders of its place on all nodes, whose ranks are numbered by
  // node; a channel for each lane. Empty: not a leader.
  std::vector<std::shared_ptr<mpi::Channel>> column;

  size_t place() const { return shm_group->self(); }
  size_t members() const { return shm_group->size(); }
  bool one_each() const { return most_members == 1; }
  size_t ranks() const;

  // Where a rank of the group is.
  size_t node_of(int rank) const;
  size_t place_of(int rank) const;
};

// The layout of a group that is connected. All its ranks call it; `channel` is the group's.
std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel);

}  // namespace hbm::hierarchical
