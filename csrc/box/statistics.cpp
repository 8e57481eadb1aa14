#include "box/statistics.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace hbm::box {
namespace {

// The rows from the one numbered `first` that fit into `room` bytes, which shrinks by them.
template <class Row>
std::span<const Row> fitting(const std::vector<Row>& rows, size_t first, size_t& room) {
  first = std::min(first, rows.size());
  const size_t count = std::min(rows.size() - first, room / sizeof(Row));
  room -= count * sizeof(Row);
  return {rows.data() + first, count};
}

void append(std::vector<std::byte>& payload, std::span<const std::byte> bytes) {
  payload.insert(payload.end(), bytes.begin(), bytes.end());
}

}  // namespace

std::vector<std::byte> page(const Statistics& statistics, const smb::StatsQuery& query) {
  smb::StatsTotals totals = statistics.totals;
  size_t room = smb::kMaxPayload - sizeof totals;
  const auto clients = fitting(statistics.clients, query.first_client, room);
  const auto segments = fitting(statistics.segments, query.first_segment, room);
  totals.clients_here = static_cast<uint32_t>(clients.size());
  totals.segments_here = static_cast<uint32_t>(segments.size());

  std::vector<std::byte> payload;
  payload.reserve(smb::kMaxPayload - room);
  append(payload, std::as_bytes(std::span(&totals, 1)));
  append(payload, std::as_bytes(clients));
  append(payload, std::as_bytes(segments));
  return payload;
}

}  // namespace hbm::box
