#include "box/client/stats.h"

#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::client {
namespace {

template <class Row>
std::span<const std::byte> append(std::vector<Row>& table, std::span<const std::byte> rows,
                                  size_t count) {
  const size_t before = table.size();
  table.resize(before + count);
  if (count > 0) std::memcpy(table.data() + before, rows.data(), count * sizeof(Row));
  return rows.subspan(count * sizeof(Row));
}

}  // namespace

void add_page(Stats& stats, std::span<const std::byte> payload) {
  smb::StatsTotals totals{};
  if (payload.size() >= sizeof totals) std::memcpy(&totals, payload.data(), sizeof totals);
  const size_t told = sizeof totals + totals.clients_here * sizeof(smb::ClientStats) +
                      totals.segments_here * sizeof(smb::SegmentStats);
  if (payload.size() != told) {
    throw Error(ErrorKind::kNetwork, "the box's statistics have " + std::to_string(payload.size()) +
                                         " bytes, and say that they have " + std::to_string(told));
  }
  stats.totals = totals;
  const auto segments = append(stats.clients, payload.subspan(sizeof totals), totals.clients_here);
  append(stats.segments, segments, totals.segments_here);
}

}  // namespace hbm::client
