// What an operation over MPI needs: who takes part, the communicator, and where to stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "communicator/mpi/comm.h"
#include "memory/staging.h"

namespace hbm::mpi {

struct Channel {
  int rank = 0;
  int size = 1;
  int averaged = 0;                    // ranks that AVG divides by; 0: `size`
  std::string group;                   // as errors name it: "group default_pg"
  std::shared_ptr<Comm> communicator;  // null in a group of one
  std::shared_ptr<memory::StagingPool> staging;
  size_t chunk_bytes = 0;  // payload of the largest message; equal on all ranks
};

// The chunk of a group of `size` ranks: the largest with which an operation stays within
// `staging_bytes` and within what one operation may take. Throws Error(kInvalid), saying how much
// is needed, if not even the smallest fits.
size_t chunk_bytes(uint64_t staging_bytes, int size);

}  // namespace hbm::mpi
