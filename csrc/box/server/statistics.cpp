#include "box/server/statistics.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "box/protocol/proof.h"

namespace hbm::box {
namespace {

// The rows from the one numbered `first` that fit into `room` bytes, which shrinks by them.
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

std::vector<std::byte> page(const Statistics& statistics, const smb::StatsQuery& query,
                            const Reader& reader) {
  smb::StatsTotals totals = statistics.totals;
  size_t room = smb::kMaxPayload - sizeof totals;
  auto clients = fitting(statistics.clients, query.first_client, room);
  auto segments = fitting(statistics.segments, query.first_segment, room);
  totals.clients_here = static_cast<uint32_t>(clients.size());
  totals.segments_here = static_cast<uint32_t>(segments.size());

  for (smb::ClientStats& client : clients) {
    if (client.session != reader.session) {
      client.session = smb::fingerprint(reader.salt, client.session);
    }
  }
  for (smb::SegmentStats& segment : segments) {
    if (!reader.keys.contains(segment.key)) {
      segment.key = smb::fingerprint(reader.salt, segment.key);
    }
  }

  std::vector<std::byte> payload;
  payload.reserve(smb::kMaxPayload - room);
  append(payload, std::as_bytes(std::span(&totals, 1)));
  append(payload, std::as_bytes(std::span(clients)));
  append(payload, std::as_bytes(std::span(segments)));
  return payload;
}

}  // namespace hbm::box
