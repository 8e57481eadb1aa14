// A library with the names of MPI, to test how hbm treats libraries that no test can install. It is
// compiled with one of these macros, or with none:
//
//   FAKE_OPEN_MPI   the library has the symbol by which hbm recognises Open MPI
//   FAKE_STANDARD   the library has this version of the standard ABI
//   none            the library only has a name
//
// With version 1 of the standard ABI it has all functions that hbm calls, and a world of one
// process.
#include <cstring>

namespace {

int tell(const char* text, char* version, int* length) {
  std::strcpy(version, text);
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

}  // namespace

extern "C" {

#if defined(FAKE_OPEN_MPI)

int ompi_mpi_comm_world = 0;
int MPI_Get_library_version(char* version, int* length) {
  return tell("Open MPI v5.0.99, package: none", version, length);
}

#elif defined(FAKE_STANDARD)

int MPI_Get_library_version(char* version, int* length) {
  return tell("MPICH 99.0\nbuilt for a test", version, length);
}
int MPI_Abi_get_version(int* major, int* minor) {
  *major = FAKE_STANDARD;
  *minor = 0;
  return 0;
}
int MPI_Init_thread(int*, char***, int required, int* provided) {
  *provided = required;
  return 0;
}
int MPI_Comm_rank(void*, int* rank) {
  *rank = 0;
  return 0;
}
int MPI_Comm_size(void*, int* size) {
  *size = 1;
  return 0;
}

// Functions that no test calls, or that have nothing to return. Their output arguments stay
// unchanged.
#define HBM_STUB(name) \
  int MPI_##name() { return 0; }
HBM_STUB(Bcast)
HBM_STUB(Cancel)
HBM_STUB(Comm_create_group)
HBM_STUB(Comm_free)
HBM_STUB(Comm_get_attr)
HBM_STUB(Comm_group)
HBM_STUB(Comm_set_errhandler)
HBM_STUB(Error_class)
HBM_STUB(Error_string)
HBM_STUB(Finalize)
HBM_STUB(Finalized)
HBM_STUB(Group_free)
HBM_STUB(Group_incl)
HBM_STUB(Ibarrier)
HBM_STUB(Improbe)
HBM_STUB(Imrecv)
HBM_STUB(Initialized)
HBM_STUB(Irecv)
HBM_STUB(Isend)
HBM_STUB(Query_thread)
HBM_STUB(Test)
HBM_STUB(Testsome)

#else

int MPI_Get_library_version(char* version, int* length) {
  return tell("Fake MPI 0.1", version, length);
}

#endif
}
