// The statistics of a box, and the pages in which clients read them.
//
// Threads: pure functions of what they are given.
#pragma once

#include <cstddef>
#include <set>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::box {

struct Statistics {
  smb::StatsTotals totals{};
  std::vector<smb::ClientStats> clients;
  std::vector<smb::SegmentStats> segments;
};

// For whom a page is, and so whose ids it may show; the others' are fingerprints
// (box/protocol/proof.h).
struct Reader {
  smb::Id session;
  std::set<smb::Id> keys;  // of what it attached
  smb::Nonce salt{};       // of the fingerprints
};

// The payload of a reply to kStats: the totals, and as many rows as fit from where the query
// starts, clients first. Throws Error(kUnavailable) when OpenSSL fails.
std::vector<std::byte> page(const Statistics& statistics, const smb::StatsQuery& query,
                            const Reader& reader);

}  // namespace hbm::box
