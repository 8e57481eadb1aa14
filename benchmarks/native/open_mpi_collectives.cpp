// The program "open_mpi_collectives": one rank of Open MPI's collectives (mpi_loops.h). Open MPI's
// mpiexec starts it.
#include <dlfcn.h>
#include <mpi.h>

#include "mpi_loops.h"

namespace hbm::bench {
namespace {

MpiWorld join() {
  MPI_Init(nullptr, nullptr);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MpiWorld world{};
  MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world.size);
  world.kept = {nullptr, [](void*) { MPI_Finalize(); }};
  world.library = RTLD_DEFAULT;
  return world;
}

}  // namespace
}  // namespace hbm::bench

int main() { return hbm::bench::serve_mpi(hbm::bench::join); }
