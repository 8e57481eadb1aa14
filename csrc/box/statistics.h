// What a box has done so far, and for whom.
//
// Threads: pure functions of what they are given.
#pragma once

#include <cstddef>
#include <vector>

#include "smb/protocol.h"

namespace hbm::box {

struct Statistics {
  smb::StatsTotals totals{};
  std::vector<smb::ClientStats> clients;
  std::vector<smb::SegmentStats> segments;
};

// The payload of a reply to kStats: the totals, and as many rows as fit from where the query
// starts, clients first.
std::vector<std::byte> page(const Statistics& statistics, const smb::StatsQuery& query);

}  // namespace hbm::box
