// The statistics of a box, and the pages in which clients read them.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::box::server {

struct Statistics {
  protocol::StatsTotals totals{};
  std::vector<protocol::ClientStats> clients;
  std::vector<std::string> hosts;  // of the clients, in their order; no page shows them
  std::vector<protocol::SegmentStats> segments;
};

// The client that reads a page. The page shows the id of its session and the keys of its
// attachments. It shows fingerprints (box/protocol/proof.h) of all other ids and keys.
struct Reader {
  protocol::Id session;
  std::set<protocol::Id> keys;  // of its attachments
  protocol::Nonce salt{};       // of the fingerprints of other clients' ids and keys
};

// Returns the payload of a reply to kStats: the totals, and as many rows as fit. The rows of
// clients come first, then the rows of segments. `query` has the numbers of the first client and of
// the first segment to return. Throws Error(kUnavailable) when OpenSSL fails.
std::vector<std::byte> page(const Statistics& statistics, const protocol::StatsQuery& query,
                            const Reader& reader);

}  // namespace hbm::box::server
