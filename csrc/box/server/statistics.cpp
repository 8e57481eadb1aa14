#include "box/server/statistics.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "box/protocol/proof.h"

namespace hbm::box::server {
namespace {

// Returns the rows from number `first` on that fit into `room` bytes, and subtracts their size from
// `room`.
template <class Row>
std::vector<Row> fitting(const std::vector<Row>& rows, size_t first, size_t& room) {
  first = std::min(first, rows.size());
  const size_t count = std::min(rows.size() - first, room / sizeof(Row));
  room -= count * sizeof(Row);
  return {rows.begin() + first, rows.begin() + first + count};
}

void append(std::vector<std::byte>& payload, std::span<const std::byte> bytes) {
  payload.insert(payload.end(), bytes.begin(), bytes.end());
}

}  // namespace

std::vector<std::byte> page(const Statistics& statistics, const protocol::StatsQuery& query,
                            const Reader& reader) {
  protocol::StatsTotals totals = statistics.totals;
  size_t room = protocol::kMaxPayload - sizeof totals;
  auto clients = fitting(statistics.clients, query.first_client, room);
  auto segments = fitting(statistics.segments, query.first_segment, room);
  totals.clients_here = static_cast<uint32_t>(clients.size());
  totals.segments_here = static_cast<uint32_t>(segments.size());

  for (protocol::ClientStats& client : clients) {
    if (client.session != reader.session) {
      client.session = protocol::fingerprint(reader.salt, client.session);
    }
  }
  for (protocol::SegmentStats& segment : segments) {
    if (!reader.keys.contains(segment.key)) {
      segment.key = protocol::fingerprint(reader.salt, segment.key);
    }
  }

  std::vector<std::byte> payload;
  payload.reserve(protocol::kMaxPayload - room);
  append(payload, std::as_bytes(std::span(&totals, 1)));
  append(payload, std::as_bytes(std::span(clients)));
  append(payload, std::as_bytes(std::span(segments)));
  return payload;
}

}  // namespace hbm::box::server
