#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/module.h"
#include "layerdrop.h"
#include "low_rank.h"

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
  const auto define = [&m](const char* name, auto function) {
    m.def(name, function, py::arg("matrices"), py::arg("lefts"), py::arg("rights"),
          py::arg("factor"), Unlocked());
  };
  define("layerdrop_find_lefts", &layerdrop::find_lefts);
  define("layerdrop_find_rights", &layerdrop::find_rights);
  define("layerdrop_set_matrices", &layerdrop::set_matrices);
  define("layerdrop_add_to_matrices", &layerdrop::add_to_matrices);
  m.def("layerdrop_transpose_blocks", &layerdrop::transpose_blocks, py::arg("sources"),
        py::arg("targets"), py::arg("rows"), py::arg("columns"), Unlocked());
  m.def("layerdrop_normalize_rows", &layerdrop::normalize_rows, py::arg("matrices"), Unlocked());
  m.def("layerdrop_bases", &layerdrop::bases, py::arg("lefts"), Unlocked());
}

}  // namespace hbm
