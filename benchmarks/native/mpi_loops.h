// Loops of MPI's own collectives, without Python. The build compiles mpi_loops.cpp twice, each time
// with the mpi.h of one ABI: for mpi_collectives.cpp, and for open_mpi_collectives.cpp.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "collective_loops.h"

namespace hbm::bench {

// A rank in MPI_COMM_WORLD.
struct MpiWorld {
  int rank;
  int size;
  std::shared_ptr<void> kept;  // keeps MPI initialised
  void* library;               // handle for dlsym()

  // Returns a function of MPI. Throws Error(kUnavailable) if the library lacks it.
  template <class Function>
  Function* function(const char* name) const {
    void* const found = dlsym(library, name);
    if (found == nullptr) throw Error(ErrorKind::kUnavailable, dlerror());
    return reinterpret_cast<Function*>(found);
  }
};

// Makes a function that runs a collective once and returns MPI's error code; an empty function for
// an unknown name.
using MakeMpiCall = std::function<std::function<int()>(
    const MpiWorld& world, const std::string& collective, const CollectiveBuffers& buffers)>;

// Serves the commands of collective_loops.h, in float32, float64 and int32. Returns the exit
// status. `further`: makes the calls of collectives that MPI itself lacks.
int serve_mpi(const std::function<MpiWorld()>& join, MakeMpiCall further = {});

}  // namespace hbm::bench
