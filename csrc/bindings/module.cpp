// The native module: every part registers its own names.
#include <pybind11/pybind11.h>

#include "bindings/errors.h"
#include "bindings/module.h"

namespace {

// For this module alone, as in smb_module.cpp.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const hbm::Error& ours) {
    hbm::set_python_error(ours, PyExc_RuntimeError);
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  pybind11::register_local_exception_translator(&translate);
  hbm::register_interruption();
  hbm::register_layerdrop(m);
  hbm::register_memory(m);
  hbm::register_process_group(m);
}
