// The client of a memory box, in Python: Client, Segment, Batch and Future of torch_hbmcomm._smb.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

void register_smb_client(pybind11::module_& m);

}  // namespace hbm
