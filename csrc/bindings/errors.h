// hbm::Error as Python's own exceptions, for both native modules (docs/errors.md). What c10d's
// calls throw becomes PyTorch's in process_group/types.h.
#pragma once

#include <Python.h>

#include "base/error.h"

namespace hbm {

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
  PyErr_SetString(type, error.what());
}

}  // namespace hbm
