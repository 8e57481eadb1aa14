#include "bindings/smb_stats_bindings.h"

#include <pybind11/stl.h>

#include "box/client/options.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

using namespace py::literals;

void add_counts(py::dict& dict, const box::protocol::Counts& counts) {
  dict["reads"] = counts.reads;
  dict["read_bytes"] = counts.read_bytes;
  dict["writes"] = counts.writes;
  dict["written_bytes"] = counts.written_bytes;
  dict["accumulates"] = counts.accumulates;
  dict["accumulated_bytes"] = counts.accumulated_bytes;
  dict["fetch_adds"] = counts.fetch_adds;
}

}  // namespace

py::dict totals_dict(const box::protocol::StatsTotals& totals) {
  py::dict dict("capacity_bytes"_a = totals.capacity_bytes, "used_bytes"_a = totals.used_bytes,
                "largest_free_bytes"_a = totals.largest_free_bytes, "clients"_a = totals.clients,
                "segments"_a = totals.segments, "uptime_ms"_a = totals.uptime_ms);
  add_counts(dict, totals.counts);
  return dict;
}

py::dict client_dict(const box::protocol::ClientStats& client) {
  py::dict dict("session"_a = halves(client.session), "pid"_a = client.pid,
                "transport"_a = box::client::transport_name(
                    static_cast<box::protocol::TransportKind>(client.transport)),
                "attachments"_a = client.attachments, "connections"_a = client.connected,
                "idle_ms"_a = client.idle_ms);
  add_counts(dict, client.counts);
  return dict;
}

py::dict segment_dict(const box::protocol::SegmentStats& segment) {
  py::dict dict("key"_a = halves(segment.key), "size"_a = segment.size,
                "attachments"_a = segment.attachments, "temporary"_a = segment.temporary != 0);
  add_counts(dict, segment.counts);
  return dict;
}

}  // namespace hbm::bindings
