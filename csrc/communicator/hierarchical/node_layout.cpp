#include "communicator/hierarchical/node_layout.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hbm::communicator::hierarchical {
namespace {

auto find(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank);
}

bool by_size(const std::vector<int>& a, const std::vector<int>& b) { return a.size() < b.size(); }

}  // namespace

size_t NodeLayout::ranks() const {
  size_t count = 0;
  for (const auto& local_ranks : nodes) count += local_ranks.size();
  return count;
}

size_t NodeLayout::node_of(int rank) const {
  const auto has = [rank](const std::vector<int>& local_ranks) {
    return find(local_ranks, rank) != local_ranks.end();
  };
  return static_cast<size_t>(std::find_if(nodes.begin(), nodes.end(), has) - nodes.begin());
}

size_t NodeLayout::local_rank_of(int rank) const {
  const std::vector<int>& local_ranks = nodes[node_of(rank)];
  return static_cast<size_t>(find(local_ranks, rank) - local_ranks.begin());
}

std::shared_ptr<const NodeLayout> make_node_layout(const bootstrap::Rendezvous& rendezvous,
                                                   const mpi::MpiConnection& connection,
                                                   const std::vector<int>& node_of,
                                                   std::shared_ptr<shm::ShmGroup> shm_group,
                                                   const mpi::Channel& channel) {
  auto layout = std::make_shared<NodeLayout>();
  std::map<int, size_t> index_of;  // index in layout->nodes, by the node's number in node_of
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    const auto [node, added] = index_of.try_emplace(node_of[rank], layout->nodes.size());
    if (added) layout->nodes.emplace_back();
    layout->nodes[node->second].push_back(static_cast<int>(rank));
  }
  const auto& nodes = layout->nodes;
  layout->node = layout->node_of(channel.rank);
  layout->leaders = std::min_element(nodes.begin(), nodes.end(), by_size)->size();
  layout->most_local_ranks = std::max_element(nodes.begin(), nodes.end(), by_size)->size();
  layout->chunk_bytes = channel.chunk_bytes;
  layout->staging = channel.staging;
  if (connection.wakes) layout->arrivals = connection.arrivals;
  layout->shm_group = std::move(shm_group);
  const size_t local_rank = layout->local_rank();
  if (local_rank >= layout->leaders) return layout;

  mpi::Channel rail = channel;
  for (const auto& local_ranks : nodes) rail.group_ranks.push_back(local_ranks[local_rank]);
  rail.communicator = mpi::connect_some(rendezvous, connection, rail.group_ranks);
  rail.rank = static_cast<int>(layout->node);
  rail.size = static_cast<int>(nodes.size());
  for (rail.tag_range = 0; rail.tag_range < mpi::kTagRanges; ++rail.tag_range) {
    layout->rail.push_back(std::make_shared<mpi::Channel>(rail));
  }
  return layout;
}

}  // namespace hbm::communicator::hierarchical
