// Statistics of a box as Python's dicts, the same for its clients and for itself.
#pragma once

#include <pybind11/pybind11.h>

#include "box/protocol/protocol.h"

namespace hbm {

using KeyHalves = std::pair<uint64_t, uint64_t>;  // high, low
inline KeyHalves halves(smb::Id id) { return {id.high, id.low}; }

pybind11::dict totals_dict(const smb::StatsTotals& totals);
pybind11::dict client_dict(const smb::ClientStats& client);
pybind11::dict segment_dict(const smb::SegmentStats& segment);

// `Stats` has totals, clients and segments.
template <class Stats>
pybind11::dict stats_dict(const Stats& stats) {
  pybind11::dict dict = totals_dict(stats.totals);
  pybind11::list clients;
  for (const smb::ClientStats& client : stats.clients) clients.append(client_dict(client));
  pybind11::list segments;
  for (const smb::SegmentStats& segment : stats.segments) segments.append(segment_dict(segment));
  dict["client_table"] = clients;
  dict["segment_table"] = segments;
  return dict;
}

}  // namespace hbm
