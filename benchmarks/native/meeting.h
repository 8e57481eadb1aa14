// Ranks of a benchmark, each a program of its own, meet by files in a directory.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/connect.h"

namespace hbm::bench {

inline constexpr std::chrono::seconds kPatience{60};

// A rank's place among them.
struct RankPlace {
  std::string directory;
  int rank;
  int size;
};

// All ranks call it; `tell` adds what the others shall know of this one. Throws Error(kTimeout).
bootstrap::Rendezvous meet(const RankPlace& place,
                           const std::function<void(bootstrap::Member&)>& tell);

// A communicator of all ranks, in an MPI world that they form. REQUIRES: several ranks.
communicator::mpi::MpiConnection connect_by_mpi(const RankPlace& place);

}  // namespace hbm::bench
