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
                             "rank"_a = issued.group->rank,
                             "shares_memory"_a = issued.group->shares_memory));
    }
    operations.append(py::dict("group"_a = found->second, "kind"_a = issued.kind->word(),
                               "sequence"_a = issued.sequence, "peer"_a = issued.peer,
                               "bytes"_a = issued.bytes, "place"_a = name_of(issued.place),
                               "begin"_a = each.begin_ns, "end"_a = each.end_ns,
                               "waited"_a = each.waited_ns, "busy"_a = each.busy_ns));
  }
  return py::dict("begin"_a = records.begin_ns, "end"_a = records.end_ns, "lost"_a = records.lost,
                  "rank"_a = log::rank(), "groups"_a = groups, "operations"_a = operations);
}

}  // namespace

void register_profile(py::module_& m) {
  m.def("profile_start", &Profile::start, py::call_guard<py::gil_scoped_release>());
  m.def("profile_stop", &stop);
}

}  // namespace hbm::bindings
