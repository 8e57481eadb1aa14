// Installs the check of base/interruption.h, which lets Ctrl-C end a collective.
#include <pybind11/pybind11.h>

#include <csignal>
#include <exception>

#include "base/interruption.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

// Returns true if Ctrl-C raises KeyboardInterrupt, and no other signal has a handler in Python. A
// handler in Python may do anything, such as destroy the group, so it must run between operations,
// not within one.
bool only_ctrl_c() {
  // `_signal` is in C. The functions of `signal` are in Python, and the interpreter may run the
  // handlers of pending signals while it executes them.
  const py::module_ signals = py::module_::import("_signal");
  const py::object getsignal = signals.attr("getsignal");
  if (!getsignal(SIGINT).is(signals.attr("default_int_handler"))) return false;
  for (int number = 1; number < NSIG; ++number) {
    if (number == SIGINT) continue;
    // If a signal has no handler in Python, getsignal() returns an int or None.
    if (PyCallable_Check(getsignal(number).ptr()) != 0) return false;
  }
  return true;
}

std::exception_ptr keyboard_interrupt() {
  if (Py_IsInitialized() == 0) return nullptr;
  const py::gil_scoped_acquire lock;
  try {
    if (!only_ctrl_c()) return nullptr;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

void register_interruption() { set_interruption_check(&keyboard_interrupt); }

}  // namespace hbm::bindings
