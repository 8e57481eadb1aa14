// hbm::Error as Python's own exceptions, for both native modules (docs/errors.md). What c10d's
// calls throw becomes PyTorch's in process_group/types.h.
#pragma once

#include <Python.h>

#include <cstring>

#include "base/error.h"

namespace hbm {

// Sets a Python exception. What is not UTF-8 in the text, which may come from another process,
// becomes U+FFFD.
inline void set_python_error(PyObject* type, const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
  if (decoded == nullptr) return;  // which has set an error
  PyErr_SetObject(type, decoded);
  Py_DECREF(decoded);
}

// Sets Python's exception of an error's kind. `network` is that of kNetwork, on which the modules
// differ.
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

}  // namespace hbm
