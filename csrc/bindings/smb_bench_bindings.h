// What `hbmcomm bench box` measures natively, as functions of torch_hbmcomm._smb: the loops of the
// box's client without Python in them, and the bounds that they are compared with.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

// REQUIRES: the classes of the client and the translation of Error are registered in `m`.
void register_smb_bench(pybind11::module_& m);

}  // namespace hbm
