// The MPI library, loaded on demand: a process loads MPI only when a group needs it. One build
// works with every library of two ABIs. PyPI's mpich, Debian's libmpich12 and Intel MPI have
// MPICH's ABI. libmpi_abi.so.1 of MPICH 5, Intel MPI 2021.18 and Open MPI 6 has MPI 5's standard
// ABI.
//
// The library is the first of these: the one that HBMCOMM_MPI_LIB names; one that the process has
// loaded already, so that mpi4py and hbm share it; one next to this Python (PyPI's mpich); the
// system's. If a place on the disk has several libraries, hbm prefers one with MPICH's ABI. Several
// libraries that the process has loaded are an error.
//
// Threads: any thread may call every function.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/mpi/api.h"

namespace hbm::communicator::mpi {

struct MpiLibrary {
  std::string path;      // of the shared object
  std::string found_by;  // the rule above by which it was found
  // False for an MPICH built without PMIx. Libraries other than MPICH can load PMIx themselves.
  bool speaks_pmix;
  std::unique_ptr<const Api> api;
};

// Sets the directories with libraries next to this Python. Call it before library().
void set_search_path(std::vector<std::string> directories);

// Returns true if this process has an MPI library loaded. Loads none.
bool already_loaded();

// Loads the library on the first call, and returns it. Throws Error(kUnavailable) if no library is
// found, with the paths tried and a remedy, or if the library has another ABI.
const MpiLibrary& library();

}  // namespace hbm::communicator::mpi
