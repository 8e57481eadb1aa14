// The process group and its bootstrap, as Python sees them (torch_hbmcomm/_C.pyi).
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

void register_process_group(pybind11::module_& m);

}  // namespace hbm
