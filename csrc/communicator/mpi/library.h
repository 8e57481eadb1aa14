// libmpi, loaded on demand: no process pays for MPI before a group needs it, and one build works
// with every library of the MPICH ABI (PyPI's mpich, Debian's libmpich12, Intel MPI, MVAPICH, ...).
//
// The library is, in this order: what HBMCOMM_MPI_LIB names; one that the process has loaded
// already (so that mpi4py and we share it); PyPI's mpich beside this Python; the system's.
#pragma once

#include <mpi.h>

#ifndef MPICH_VERSION
#error "torch_hbmcomm needs MPICH's mpi.h (or another of the MPICH ABI); this is another MPI's"
#endif

#include <string>
#include <vector>

namespace hbm::mpi {

// clang-format off
#define HBM_MPI_FUNCTIONS(X)                                                     \
  X(Init_thread) X(Initialized) X(Finalized) X(Finalize) X(Query_thread)        \
  X(Get_library_version) X(Comm_rank) X(Comm_size) X(Comm_group)                \
  X(Comm_create_group) X(Comm_free) X(Comm_set_errhandler) X(Comm_get_attr)     \
  X(Group_incl) X(Group_free) X(Isend) X(Irecv) X(Improbe) X(Imrecv)            \
  X(Testsome) X(Test) X(Cancel) X(Ibarrier) X(Bcast) X(Error_string)            \
  X(Error_class)
// clang-format on

// The functions in use, by their MPI names without the prefix.
struct MpiLibrary {
#define HBM_MPI_MEMBER(name) decltype(&::MPI_##name) name = nullptr;
  HBM_MPI_FUNCTIONS(HBM_MPI_MEMBER)
#undef HBM_MPI_MEMBER

  std::string path;      // of the shared object
  std::string found_by;  // which of the rules above
  std::string version;   // first line of MPI_Get_library_version

  // Throws Error(kNetwork) naming `call` and MPI's own text unless `code` is MPI_SUCCESS.
  void check(int code, const char* call) const;
};

// Directories to look into for PyPI's mpich. To be called before library(), if at all.
void set_search_path(std::vector<std::string> directories);

// Whether this process has an MPI library loaded, without loading one.
bool already_loaded();

// Loads the library once. Throws Error(kUnavailable): not found (where it looked, what to install),
// or not of the MPICH ABI (what was found instead). Thread-safe.
const MpiLibrary& library();

}  // namespace hbm::mpi
