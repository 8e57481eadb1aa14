#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/module.h"
#include "error_feedback.h"
#include "layerdrop.h"
#include "low_rank.h"

namespace py = pybind11;

namespace hbm::bindings {

void register_compression(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("error_feedback_accumulate", &error_feedback::accumulate, py::arg("gradients"),
        py::arg("before"), py::arg("after"), py::arg("factor"), py::arg("squares"), Unlocked());
  m.def("error_feedback_pack", &error_feedback::pack, py::arg("residuals"), py::arg("wire"),
        py::arg("factor"), py::arg("inverse"), Unlocked());
  m.def("error_feedback_unpack", &error_feedback::unpack, py::arg("wire"), py::arg("buffer"),
        py::arg("begins"), py::arg("counts"), Unlocked());
  m.def("layerdrop_threshold", &layerdrop::threshold, py::arg("scores"), py::arg("sizes"),
        py::arg("ratio"), Unlocked());
  const auto define = [&m](const char* name, auto function) {
    m.def(name, function, py::arg("matrices"), py::arg("lefts"), py::arg("rights"),
          py::arg("factor"), Unlocked());
  };
  define("low_rank_find_lefts", &low_rank::find_lefts);
  define("low_rank_find_rights", &low_rank::find_rights);
  define("low_rank_set_matrices", &low_rank::set_matrices);
  define("low_rank_add_to_matrices", &low_rank::add_to_matrices);
  m.def("low_rank_transpose_blocks", &low_rank::transpose_blocks, py::arg("sources"),
        py::arg("targets"), py::arg("rows"), py::arg("columns"), Unlocked());
  m.def("low_rank_normalize_rows", &low_rank::normalize_rows, py::arg("matrices"), Unlocked());
  m.def("low_rank_bases", &low_rank::bases, py::arg("lefts"), Unlocked());
}

}  // namespace hbm::bindings
