// What torch_hbmcomm/layer_drop/ needs of layerdrop.h, as layerdrop_* functions of the native
// module.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

// Errors leave as hbm::Error; the module that calls this translates them.
void register_layerdrop(pybind11::module_& m);

}  // namespace hbm
