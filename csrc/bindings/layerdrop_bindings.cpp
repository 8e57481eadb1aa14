#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/module.h"
#include "layerdrop.h"

namespace py = pybind11;

namespace hbm {

void register_layerdrop(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("layerdrop_accumulate", &layerdrop::accumulate, py::arg("gradients"), py::arg("before"),
        py::arg("after"), py::arg("factor"), py::arg("squares"), Unlocked());
  m.def("layerdrop_pack", &layerdrop::pack, py::arg("caches"), py::arg("wire"), py::arg("factor"),
        py::arg("inverse"), Unlocked());
  m.def("layerdrop_unpack", &layerdrop::unpack, py::arg("wire"), py::arg("buffer"),
        py::arg("begins"), py::arg("counts"), Unlocked());
  m.def("layerdrop_threshold", &layerdrop::threshold, py::arg("representatives"), py::arg("sizes"),
        py::arg("ratio"), Unlocked());
}

}  // namespace hbm
