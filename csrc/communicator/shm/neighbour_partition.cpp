#include "communicator/shm/neighbour_partition.h"

#include <algorithm>

namespace hbm::shm {

std::vector<int> partition(const std::vector<std::string>& mapped) {
  std::vector<std::vector<size_t>> nodes;
  std::vector<int> node_of;
  for (size_t rank = 0; rank < mapped.size(); ++rank) {
    const auto fits = [&](const std::vector<size_t>& node) {
      return std::all_of(node.begin(), node.end(), [&](size_t other) {
        return mapped[rank][other] == '1' && mapped[other][rank] == '1';
      });
    };
    const auto place = std::find_if(nodes.begin(), nodes.end(), fits);
    node_of.push_back(static_cast<int>(place - nodes.begin()));
    if (place == nodes.end()) {
      nodes.push_back({rank});
    } else {
      place->push_back(rank);
    }
  }
  return node_of;
}

}  // namespace hbm::shm
