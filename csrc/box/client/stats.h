// A box's statistics, as its clients receive them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::client {

struct Stats {
  smb::StatsTotals totals{};
  std::vector<smb::ClientStats> clients;
  std::vector<smb::SegmentStats> segments;
};

// Appends the tables of one reply to kStats, and takes its totals.
// Throws Error(kNetwork) when the reply is not as long as it says.
void add_page(Stats& stats, std::span<const std::byte> payload);

}  // namespace hbm::client
