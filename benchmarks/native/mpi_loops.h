// MPI's own collectives in a loop, without Python. What this declares is compiled with the mpi.h of
// each ABI: mpi_collectives.cpp, open_mpi_collectives.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace hbm::bench {

// A rank's place in MPI_COMM_WORLD.
struct MpiWorld {
  int rank;
  int size;
  std::shared_ptr<void> kept;  // as long as the world is needed
  void* library;               // of dlsym()
};

// Answers these commands (program.h) until the end of the input, and returns the exit status:
//
//   ready                          calls `join`, and answers once all have met
//   prepare COLLECTIVE BYTES TYPE  memory for it, and a first call whose outcome is checked
//   run SAMPLES CALLS              all ranks are told the same
//
// Collectives, roots and BYTES are those of torch_hbmcomm/bench/collectives.py. allgather, gather,
// scatter, reduce_scatter and alltoall go from one buffer to another, as in c10d; allreduce,
// broadcast and reduce are in place. "gather_in_place" has the root's part in its place already.
// Collectives of a part for each rank need a multiple of the ranks' number of elements. Types:
// "float32", "float64".
int serve_mpi(const std::function<MpiWorld()>& join);

}  // namespace hbm::bench
