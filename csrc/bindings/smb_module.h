// The parts of the native module _smb, the memory box in Python. The parts register the names that
// torch_hbmcomm/_smb.pyi lists. Their functions throw BoxError or hbm::Error, which smb_module.cpp
// translates.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm::bindings {

void register_smb_client(pybind11::module_& m);  // Client, Segment, Batch and Future
void register_smb_server(pybind11::module_& m);  // Server

}  // namespace hbm::bindings
