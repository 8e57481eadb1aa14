// The native module: every part registers its own names.
#include <pybind11/pybind11.h>

#include "base/error.h"
#include "bindings/bench_bindings.h"
#include "bindings/layerdrop_bindings.h"
#include "bindings/memory_bindings.h"
#include "bindings/process_group_bindings.h"

namespace {

// hbm::Error outside of c10d's calls, as Python's own exceptions (docs/errors.md).
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const hbm::Error& ours) {
    switch (ours.kind()) {
      case hbm::ErrorKind::kInvalid:
      case hbm::ErrorKind::kUnsupported:
        PyErr_SetString(PyExc_ValueError, ours.what());
        return;
      case hbm::ErrorKind::kExhausted:
        PyErr_SetString(PyExc_MemoryError, ours.what());
        return;
      default:
        PyErr_SetString(PyExc_RuntimeError, ours.what());
    }
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  pybind11::register_exception_translator(&translate);
  hbm::register_bench(m);
  hbm::register_layerdrop(m);
  hbm::register_memory(m);
  hbm::register_process_group(m);
}
