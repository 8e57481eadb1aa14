// The native module: every part registers its own names, most of them only when one is used.
#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <thread>

#include "base/log.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "kernels/reduce.h"

namespace py = pybind11;

namespace hbm {
namespace {

// For this module alone, as in smb_module.cpp.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& ours) {
    set_python_error(ours, PyExc_RuntimeError);
  }
}

void register_late(py::module_& m) {
  register_layerdrop(m);
  register_memory(m);
  register_mpi(m);
  m.def("warn", &log::warn, py::arg("message"));
  m.def("info", &log::info, py::arg("message"));
  m.def("reduce_isa", &reduce_isa);
}

// Registers what a start does not need, once the first of it is asked for, as each function costs
// 10 µs and more. Returns what has that name.
py::object late(const std::string& name) {
  // Guarded by Python's lock, which a finalizer may hand to another thread meanwhile. def() asks
  // for each name first, and so comes back here.
  static std::thread::id registering;
  static bool registered = false;
  auto m = py::module_::import("torch_hbmcomm._C");
  while (registering != std::thread::id() && registering != std::this_thread::get_id()) {
    const py::gil_scoped_release others;
    std::this_thread::yield();
  }
  if (!registered && registering == std::thread::id()) {
    registering = std::this_thread::get_id();
    try {
      register_late(m);
      registered = true;
    } catch (...) {
      registering = {};
      throw;
    }
    registering = {};
  }
  const auto names = m.attr("__dict__").cast<py::dict>();
  if (names.contains(name)) return names[name.c_str()];
  throw py::attribute_error("module 'torch_hbmcomm._C' has no attribute '" + name + "'");
}

}  // namespace
}  // namespace hbm

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&hbm::translate);
  hbm::register_interruption();
  hbm::register_process_group(m);
  m.def("__getattr__", &hbm::late, py::arg("name"));
}
