// The native module: every part registers its own names, most of them at their first use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <string>

#include "base/log.h"
#include "base/tcp.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "kernels/reduce.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

// Translates the exceptions of this module only: _smb has its own translator.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& ours) {
    set_python_error(ours, PyExc_RuntimeError);
  }
}

// Returns the object with this name. The first call registers the names that are not needed at
// every start, because registering one function takes 10 µs or more.
//
// A finalizer may pass Python's lock to another thread while names are registered. So the names are
// made in a temporary module and then merged into this module in one step; two threads may both
// make them.
py::object late(const std::string& name) {
  static bool registered = false;  // guarded by Python's lock
  auto m = py::module_::import("torch_hbmcomm._C");
  if (!registered) {
    auto made = py::reinterpret_steal<py::module_>(PyModule_New(PyModule_GetName(m.ptr())));
    if (!made) throw py::error_already_set();
    register_compression(made);
    register_memory(made);
    register_mpi(made);
    register_profile(made);
    made.def("warn", &log::warn, py::arg("message"));
    made.def("info", &log::info, py::arg("message"));
    made.def("machine_addresses", &machine_addresses);
    made.def("reduce_isa", &kernels::reduce_isa);
    if (PyDict_Merge(PyModule_GetDict(m.ptr()), PyModule_GetDict(made.ptr()), /*override=*/0) !=
        0) {
      throw py::error_already_set();
    }
    registered = true;
  }
  const auto names = m.attr("__dict__").cast<py::dict>();
  if (names.contains(name)) return names[name.c_str()];
  throw py::attribute_error("module 'torch_hbmcomm._C' has no attribute '" + name + "'");
}

}  // namespace
}  // namespace hbm::bindings

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&hbm::bindings::translate);
  hbm::bindings::register_interruption();
  hbm::bindings::register_interpreter_end(m);
  hbm::bindings::register_process_group(m);
  m.def("__getattr__", &hbm::bindings::late, py::arg("name"));
}
