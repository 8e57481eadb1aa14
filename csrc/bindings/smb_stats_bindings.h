// Statistics of a box as Python dicts, for clients and for the server.
#pragma once

#include <pybind11/pybind11.h>

#include "box/protocol/protocol.h"

namespace hbm::bindings {

using KeyHalves = std::pair<uint64_t, uint64_t>;  // high, low
inline KeyHalves halves(box::protocol::Id id) { return {id.high, id.low}; }

pybind11::dict totals_dict(const box::protocol::StatsTotals& totals);
pybind11::dict client_dict(const box::protocol::ClientStats& client);
pybind11::dict segment_dict(const box::protocol::SegmentStats& segment);

// `Stats` has the members totals, clients and segments.
template <class Stats>
pybind11::dict stats_dict(const Stats& stats) {
  pybind11::dict dict = totals_dict(stats.totals);
  pybind11::list clients;
  for (const box::protocol::ClientStats& client : stats.clients)
    clients.append(client_dict(client));
  pybind11::list segments;
  for (const box::protocol::SegmentStats& segment : stats.segments)
    segments.append(segment_dict(segment));
  dict["client_table"] = clients;
  dict["segment_table"] = segments;
  return dict;
}

}  // namespace hbm::bindings
