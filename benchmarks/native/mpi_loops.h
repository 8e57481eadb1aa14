// Loops of MPI's own collectives, without Python. The build compiles mpi_loops.cpp twice, each time
// with the mpi.h of one ABI: for mpi_collectives.cpp, and for open_mpi_collectives.cpp.
#pragma once

#include <functional>
#include <memory>

namespace hbm::bench {

// A rank in MPI_COMM_WORLD.
struct MpiWorld {
  int rank;
  int size;
  std::shared_ptr<void> kept;  // keeps MPI initialised
  void* library;               // handle for dlsym()
};

// Serves the commands of collective_loops.h, in float32, float64 and int32. Returns the exit
// status.
int serve_mpi(const std::function<MpiWorld()>& join);

}  // namespace hbm::bench
