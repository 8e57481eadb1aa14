// From who has mapped whom to nodes.
#pragma once

#include <string>
#include <vector>

namespace hbm::shm {

// mapped[a][b] is '1' if rank a has mapped b's segment. The ranks of a node have all mapped one
// another; each rank, in order, joins the first node where this holds. Returns node numbers by
// rank, numbered by first rank.
std::vector<int> partition(const std::vector<std::string>& mapped);

}  // namespace hbm::shm
