#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "base/log.h"
#include "bindings/module.h"
#include "process_group/profile.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

using process_group::Profile;

const char* name_of(Profile::Place place) {
  switch (place) {
    case Profile::Place::kSegment:
      return "segment";
    case Profile::Place::kOrdinary:
      return "ordinary";
    case Profile::Place::kDevice:
      return "device";
  }
  return "";
}

const char* name_of(process_group::Path path) {
  switch (path) {
    case process_group::Path::kShm:
      return "shm";
    case process_group::Path::kMpi:
      return "MPI";
    case process_group::Path::kShmAndMpi:
      return "shm, MPI";
  }
  return "";
}

const char* name_of_data(bool staged, bool zero_copy) {
  if (staged) return zero_copy ? "staged, zero-copy" : "staged";
  return zero_copy ? "zero-copy" : "none";
}

// Returns the records as dicts, lists and numbers, ready for a JSON file.
py::dict stop() {
  using namespace py::literals;
  Profile::Records records;
  {
    const py::gil_scoped_release unlocked;
    records = Profile::stop();
  }
  std::map<const Profile::Group*, int> numbers;
  py::list groups;
  py::list operations;
  for (const Profile::Operation& each : records.operations) {
    const Profile::Issued& issued = each.issued;
    const auto [found, is_new] =
        numbers.try_emplace(issued.group.get(), static_cast<int>(numbers.size()));
    if (is_new) {
      groups.append(py::dict("key"_a = issued.group->key, "name"_a = issued.group->name,
                             "ranks"_a = issued.group->ranks, "nodes"_a = issued.group->nodes,
                             "rank"_a = issued.group->rank));
    }
    operations.append(
        py::dict("group"_a = found->second, "kind"_a = issued.kind->word(),
                 "sequence"_a = issued.sequence, "peer"_a = issued.peer, "bytes"_a = issued.bytes,
                 "path"_a = name_of(issued.path()), "place"_a = name_of(issued.place),
                 "data"_a = name_of_data(each.observed.staged, each.observed.zero_copy),
                 "begin"_a = each.begin_ns, "end"_a = each.end_ns, "waited"_a = each.waited_ns,
                 "busy"_a = each.busy_ns));
  }
  return py::dict("begin"_a = records.begin_ns, "end"_a = records.end_ns, "lost"_a = records.lost,
                  "rank"_a = log::rank(), "first_group"_a = records.first_group,
                  "groups"_a = groups, "operations"_a = operations);
}

// Returns the totals as dicts, with the number of the operations that no total has.
py::dict totals() {
  using namespace py::literals;
  const auto taken = [] {
    const py::gil_scoped_release unlocked;
    return Profile::totals();
  }();
  py::list all;
  for (const process_group::ProfileTotals::Total& each : taken.totals()) {
    all.append(py::dict(
        "kind"_a = each.key.kind, "limit"_a = each.key.limit, "path"_a = name_of(each.key.path),
        "data"_a = name_of_data(each.key.staged, each.key.zero_copy),
        "last_rank"_a = each.key.last_rank, "calls"_a = each.calls, "bytes"_a = each.bytes,
        "transit"_a = each.transit_ns, "hidden"_a = each.hidden_ns, "waiting"_a = each.waiting_ns));
  }
  return py::dict("rank"_a = log::rank(), "uncounted"_a = taken.uncounted(), "totals"_a = all);
}

}  // namespace

void register_profile(py::module_& m) {
  m.def("profile_start", &Profile::start, py::call_guard<py::gil_scoped_release>());
  m.def("profile_stop", &stop);
  m.def("profile_start_totals", &Profile::start_totals, py::call_guard<py::gil_scoped_release>());
  m.def("profile_totals", &totals);
}

}  // namespace hbm::bindings
