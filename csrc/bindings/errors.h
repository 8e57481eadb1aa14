// Converts hbm::Error to Python's own exceptions, for both native modules (docs/errors.md).
// process_group/types.h converts the errors of c10d's calls to PyTorch's.
//
// Threads: the caller holds Python's lock.
#pragma once

#include <Python.h>

#include <cstring>

#include "base/error.h"

namespace hbm::bindings {

// Sets a Python exception. The text may come from another process; invalid UTF-8 becomes U+FFFD.
inline void set_python_error(PyObject* type, const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
  if (decoded == nullptr) return;  // Python has set an error
  PyErr_SetObject(type, decoded);
  Py_DECREF(decoded);
}

// Sets the Python exception for an error's kind. `network` is the exception for kNetwork, which
// differs between the modules.
inline void set_python_error(const Error& error, PyObject* network) {
  const auto type = [&] {
    switch (error.kind()) {
      case ErrorKind::kInvalid:
      case ErrorKind::kUnsupported:
        return PyExc_ValueError;
      case ErrorKind::kExhausted:
        return PyExc_MemoryError;
      case ErrorKind::kNetwork:
        return network;
      default:
        return PyExc_RuntimeError;
    }
  }();
  set_python_error(type, error.what());
}

}  // namespace hbm::bindings
