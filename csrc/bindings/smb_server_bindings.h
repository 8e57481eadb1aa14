// The memory box in Python: Server of torch_hbmcomm._smb.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

void register_smb_server(pybind11::module_& m);

}  // namespace hbm
