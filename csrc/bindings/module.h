// The parts of the native module _C. The parts register the names that torch_hbmcomm/_C.pyi lists.
// Their functions throw hbm::Error, which module.cpp translates.
//
// Threads: the caller holds Python's lock.
#pragma once

#include <pybind11/pybind11.h>

namespace hbm::bindings {

void register_interruption();                         // lets Ctrl-C end waits
void register_interpreter_end(pybind11::module_& m);  // torch_hbmcomm/process_end.py
void register_compression(pybind11::module_& m);      // error_feedback_*, layerdrop_*, low_rank_*
void register_memory(pybind11::module_& m);           // memory_*: torch_hbmcomm/memory.py
void register_mpi(pybind11::module_& m);              // mpi_*: torch_hbmcomm/rendezvous.py
void register_profile(pybind11::module_& m);          // profile_*: torch_hbmcomm/profiling
void register_process_group(pybind11::module_& m);    // the other names; needed at every start

}  // namespace hbm::bindings
