// The native module of the memory box, without PyTorch.
#include "bindings/smb_module.h"

#include <pybind11/pybind11.h>

#include <array>
#include <exception>
#include <string>

#include "bindings/errors.h"
#include "box/client/error.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

using box::client::BoxError;
using Cause = BoxError::Cause;

// The class BoxError, and its subclasses by Cause. The classes live as long as the interpreter.
PyObject* box_error = nullptr;
std::array<PyObject*, static_cast<size_t>(Cause::kClosed) + 1> by_cause{};

PyObject* new_exception(py::module_& m, const char* name, const char* text, py::tuple bases) {
  const std::string path = std::string("torch_hbmcomm.smb.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(path.c_str(), text, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  m.add_object(name, made);
  return made;
}

void register_errors(py::module_& m) {
  const auto bases = [](PyObject* also) -> py::tuple {
    if (also == nullptr) return py::make_tuple(py::handle(box_error));
    return py::make_tuple(py::handle(box_error), py::handle(also));
  };
  box_error = new_exception(m, "BoxError", "An operation on a memory box failed.",
                            py::make_tuple(py::handle(PyExc_RuntimeError)));
  by_cause.fill(box_error);
  const auto add = [&](Cause cause, const char* name, const char* text, PyObject* also) {
    by_cause[static_cast<size_t>(cause)] = new_exception(m, name, text, bases(also));
  };
  add(Cause::kLost, "SegmentLost", "The segment is gone: the box restarted without its data.",
      nullptr);
  add(Cause::kUnreachable, "BoxUnreachable", "There is no connection to the box.",
      PyExc_ConnectionError);
  add(Cause::kDenied, "AccessDenied", "The token, or the right to write, is missing.",
      PyExc_PermissionError);
  add(Cause::kNoSuchKey, "NoSuchKey", "Nothing has that key.", PyExc_LookupError);
  add(Cause::kKeyInUse, "KeyInUse", "Something has that key.", PyExc_FileExistsError);
  add(Cause::kTimeout, "OperationTimeout", "The time given to an operation is over.",
      PyExc_TimeoutError);
}

// Translates exceptions of this module only: _C has its own translator, and both modules may share
// pybind11 registrations.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const BoxError& ours) {
    set_python_error(by_cause[static_cast<size_t>(ours.cause())], ours.what());
  } catch (const Error& ours) {
    set_python_error(ours, box_error);
  }
}

}  // namespace
}  // namespace hbm::bindings

PYBIND11_MODULE(_smb, m) {
  hbm::bindings::register_errors(m);
  py::register_local_exception_translator(&hbm::bindings::translate);
  hbm::bindings::register_smb_client(m);
  hbm::bindings::register_smb_server(m);
}
