// The statistics of a box, and the pages in which clients read them.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <set>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::box::server {

struct Statistics {
  protocol::StatsTotals totals{};
  std::vector<protocol::ClientStats> clients;
  std::vector<protocol::SegmentStats> segments;
};

// The client that reads a page. The page shows ids of this client only, and fingerprints of others
// (box/protocol/proof.h).
struct Reader {
  protocol::Id session;
  std::set<protocol::Id> keys;  // of its attachments
  protocol::Nonce salt{};       // of the fingerprints of other clients' ids and keys
};

// Returns the payload of a reply to kStats: the totals, and as many rows as fit. The rows of
// clients come first, then the rows of segments. `query` has the first row of either table. Throws
// Error(kUnavailable) when OpenSSL fails.
std::vector<std::byte> page(const Statistics& statistics, const protocol::StatsQuery& query,
                            const Reader& reader);

}  // namespace hbm::box::server
