// Keeps this library's threads out of the interpreter after its finalisation (base/process_end.h).
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <exception>

#include "base/process_end.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

std::terminate_handler before = nullptr;  // guarded by Python's lock; set once

// Up to Python 3.13, an interpreter that Py_FinalizeEx() has marked as finalising unwinds the stack
// of each thread that asks for Python's lock, to end the thread. A noexcept destructor on the
// stack, such as ~gil_scoped_release(), cannot be unwound, so C++ calls this handler. The thread
// was about to return to Python when the process began to end, so the handler parks it. The handler
// recognises such a thread by two facts: there is no exception, and another thread ends the
// process.
[[noreturn]] void park_if_unwound() {
  if (std::current_exception() == nullptr) park_at_process_end();
  before();
  std::abort();
}

// If `here`, the calling thread finalises the interpreter; otherwise the main thread does.
void end_interpreter(bool here) {
  if (before == nullptr) before = std::set_terminate(&park_if_unwound);
  const py::gil_scoped_release unlocked;
  here ? end_process() : end_process_of_main_thread();
}

}  // namespace

void register_interpreter_end(py::module_& m) {
  m.def("end_interpreter", &end_interpreter, py::arg("here"));
}

}  // namespace hbm::bindings
