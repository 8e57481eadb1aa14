// What torch_hbmcomm/memory.py needs of memory/, as memory_* functions of the native module.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

// Errors leave as hbm::Error; the module that calls this translates them.
void register_memory(pybind11::module_& m);

}  // namespace hbm
