#include "communicator/hierarchical/node_layout.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace hbm::cluster {

std::shared_ptr<const Fabric> weave(const bootstrap::Meeting& meeting,
                                    const mpi::Connection& connection,
                                    const std::vector<int>& node_of,
                                    std::shared_ptr<node::Team> team, const mpi::Channel& channel) {
  std::map<int, std::vector<int>> nodes;
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    nodes[node_of[rank]].push_back(static_cast<int>(rank));
  }
  const auto smallest = std::min_element(
      nodes.begin(), nodes.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });

  auto fabric = std::make_shared<Fabric>();
  fabric->leaders = smallest->second.size();
  const size_t place = team->self();
  fabric->team = std::move(team);
  if (place >= fabric->leaders) return fabric;

  for (const auto& [node, ranks] : nodes) fabric->column_ranks.push_back(ranks[place]);
  const auto& ranks = fabric->column_ranks;
  auto column = std::make_shared<mpi::Channel>(channel);
  column->communicator = mpi::connect_some(meeting, connection, ranks);
  column->rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), channel.rank) - ranks.begin());
  column->size = static_cast<int>(ranks.size());
  column->averaged = channel.size;
  column->group =
      "the leaders of place " + std::to_string(place) + " on the nodes of " + channel.group;
  fabric->column = std::move(column);
  return fabric;
}

}  // namespace hbm::cluster
