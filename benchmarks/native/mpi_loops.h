// MPI's own collectives in a loop, without Python. What this declares is compiled with the mpi.h of
// each ABI: mpi_collectives.cpp, open_mpi_collectives.cpp.
#pragma once

#include <functional>
#include <memory>

namespace hbm::bench {

// A rank's place in MPI_COMM_WORLD.
struct MpiWorld {
  int rank;
  int size;
  std::shared_ptr<void> kept;  // as long as the world is needed
  void* library;               // of dlsym()
};

// Serves the commands of collective_loops.h, in float32 and float64, and returns the exit status.
int serve_mpi(const std::function<MpiWorld()>& join);

}  // namespace hbm::bench
