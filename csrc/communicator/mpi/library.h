// libmpi, loaded on demand: no process pays for MPI before a group needs it, and one build works
// with every library of MPICH's ABI (PyPI's mpich, Debian's libmpich12, Intel MPI, ...) and of MPI
// 5's standard ABI (libmpi_abi.so.1 of MPICH 5, Intel MPI 2021.18 and Open MPI 6).
//
// The library is, in this order: what HBMCOMM_MPI_LIB names; one that the process has loaded
// already (so that mpi4py and we share it); one beside this Python (PyPI's mpich); the system's.
// Wherever there are several, the one with MPICH's ABI comes first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/mpi/api.h"

namespace hbm::mpi {

struct MpiLibrary {
  std::string path;      // of the shared object
  std::string found_by;  // which of the rules above
  bool speaks_pmix;      // false for an MPICH that was built without; others can load it themselves
  std::unique_ptr<const Api> api;
};

// Directories to look into for libraries beside this Python. To be called before library(), if at
// all.
void set_search_path(std::vector<std::string> directories);

// Whether this process has an MPI library loaded, without loading one.
bool already_loaded();

// Loads the library once. Throws Error(kUnavailable): not found (where it looked, what to install),
// or of another ABI (what was found instead). Thread-safe.
const MpiLibrary& library();

}  // namespace hbm::mpi
