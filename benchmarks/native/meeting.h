// Ranks of a benchmark, each in its own process, meet by files in a directory.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/connect.h"

namespace hbm::bench {

inline constexpr std::chrono::seconds kPatience{60};

// A rank's identity in the job.
struct RankPlace {
  std::string directory;
  int rank;
  int size;
};

// Meets all other ranks. All ranks call it. `tell` fills in further fields of this rank's
// introduction. Throws Error(kTimeout).
bootstrap::Rendezvous meet(const RankPlace& place,
                           const std::function<void(bootstrap::Member&)>& tell);

// Returns a communicator of all ranks, which form an MPI world. REQUIRES: several ranks.
communicator::mpi::MpiConnection connect_by_mpi(const RankPlace& place);

}  // namespace hbm::bench
