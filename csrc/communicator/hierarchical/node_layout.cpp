#include "communicator/hierarchical/node_layout.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hbm::hierarchical {
namespace {

auto find(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank);
}

bool by_size(const std::vector<int>& a, const std::vector<int>& b) { return a.size() < b.size(); }

}  // namespace

size_t NodeLayout::ranks() const {
  size_t count = 0;
  for (const auto& members : nodes) count += members.size();
  return count;
}

size_t NodeLayout::node_of(int rank) const {
  const auto has = [rank](const std::vector<int>& members) {
    return find(members, rank) != members.end();
  };
  return static_cast<size_t>(std::find_if(nodes.begin(), nodes.end(), has) - nodes.begin());
}

size_t NodeLayout::place_of(int rank) const {
  const std::vector<int>& members = nodes[node_of(rank)];
  return static_cast<size_t>(find(members, rank) - members.begin());
}

std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel) {
  auto layout = std::make_shared<NodeLayout>();
  std::map<int, size_t> index_of;  // of what node_of calls a node
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    const auto [node, added] = index_of.try_emplace(node_of[rank], layout->nodes.size());
    if (added) layout->nodes.emplace_back();
    layout->nodes[node->second].push_back(static_cast<int>(rank));
  }
  const auto& nodes = layout->nodes;
  layout->node = layout->node_of(channel.rank);
  layout->leaders = std::min_element(nodes.begin(), nodes.end(), by_size)->size();
  layout->most_members = std::max_element(nodes.begin(), nodes.end(), by_size)->size();
  layout->chunk_bytes = channel.chunk_bytes;
  layout->staging = channel.staging;
  layout->arrivals = connection.arrivals;
  layout->shm_group = std::move(shm_group);
  const size_t place = layout->place();
  if (place >= layout->leaders) return layout;

  mpi::Channel column = channel;
  for (const auto& members : nodes) column.group_ranks.push_back(members[place]);
  column.communicator = mpi::connect_some(rendezvous, connection, column.group_ranks);
  column.rank = static_cast<int>(layout->node);
  column.size = static_cast<int>(nodes.size());
  for (column.lane = 0; column.lane < mpi::kLanes; ++column.lane) {
    layout->column.push_back(std::make_shared<mpi::Channel>(column));
  }
  return layout;
}

}  // namespace hbm::hierarchical
