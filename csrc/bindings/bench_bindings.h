// The loops of `hbmcomm bench` that the cost of Python must stay out of (torch_hbmcomm/bench/), as
// bench_* functions of the native module.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm {

// Errors leave as hbm::Error or PyTorch's own; the module that calls this translates them.
void register_bench(pybind11::module_& m);

}  // namespace hbm
