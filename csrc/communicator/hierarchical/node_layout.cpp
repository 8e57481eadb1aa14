#include "communicator/hierarchical/node_layout.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace hbm::hierarchical {

std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel) {
  std::map<int, std::vector<int>> nodes;
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    nodes[node_of[rank]].push_back(static_cast<int>(rank));
  }
  const auto smallest = std::min_element(
      nodes.begin(), nodes.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });

  auto layout = std::make_shared<NodeLayout>();
  layout->leaders = smallest->second.size();
  const size_t place = shm_group->self();
  layout->shm_group = std::move(shm_group);
  if (place >= layout->leaders) return layout;

  for (const auto& [node, ranks] : nodes) layout->column_ranks.push_back(ranks[place]);
  const auto& ranks = layout->column_ranks;
  auto column = std::make_shared<mpi::Channel>(channel);
  column->communicator = mpi::connect_some(rendezvous, connection, ranks);
  column->rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), channel.rank) - ranks.begin());
  column->size = static_cast<int>(ranks.size());
  column->averaged = channel.size;
  column->group =
      "the leaders of place " + std::to_string(place) + " on the nodes of " + channel.group;
  layout->column = std::make_shared<mpi::MpiCommunicator>(std::move(column));
  return layout;
}

}  // namespace hbm::hierarchical
