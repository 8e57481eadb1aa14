// The one MPI world of this process.
//
// It is formed once, by the first group that needs MPI (form), or it is there already because a
// launcher or somebody else initialised MPI (adopt); every group's communicator is cut from it. It
// stays up until the process ends: MPI cannot be initialised twice, and MPI_Finalize hangs when a
// peer is dead or late.
//
// Threads: all functions may be called from any thread; form and adopt exclude each other.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "bootstrap/key_value.h"
#include "communicator/mpi/arrivals.h"
#include "communicator/mpi/channel.h"

namespace hbm::mpi {

struct MpiLibrary;
class PmiResponder;

using Deadline = std::chrono::steady_clock::time_point;

class World {
 public:
  // The world of this process, or null while there is none; throws Error(kUnavailable) in a child
  // forked from its owner. A world that somebody else initialised (mpi4py) is adopted here, without
  // waiting for anyone.
  static World* current();

  // Forms a world of `size` processes through the PMI responder (pmi.h) and `store`. All `size`
  // processes call it, having met in the store before. `id` is the same on all and unique.
  // Throws Error(kTimeout) at the deadline, Error(kUnavailable) without a library, and what
  // `check`, which is called meanwhile, throws of a rank that cannot come. `risks`, equal on all:
  // the variables because of which MPI_Init is tried first (trial.h); empty if there are none.
  static World& form(std::shared_ptr<KeyValue> store, const std::string& id, int rank, int size,
                     const std::vector<int>& node_of, Deadline deadline,
                     const std::function<void()>& check = {}, const std::string& risks = "");

  // Initialises MPI through the launcher that started this process (mpiexec, srun), if nobody has
  // done so yet.
  // Throws Error(kTimeout) when another rank does not come before the deadline.
  static World& launched(Deadline deadline);

  // A communicator of the given world ranks, in that order. Only its members call; they have met
  // before. `tag` tells creations apart that run at the same time; `check` is as in form().
  std::shared_ptr<Comm> communicator(const std::vector<int>& world_ranks, int tag,
                                     Deadline deadline, const std::function<void()>& check = {});

  // Sends rank 0's `value` to every rank of the world. REQUIRES: all ranks call it. Throws
  // Error(kTimeout) when they do not before the deadline.
  std::string broadcast(std::string value, Deadline deadline);

  // Finalises MPI at the end of a launched process, if every rank comes here within `patience`.
  // Otherwise leaves MPI as it is: a plain exit is clean.
  void finalize_together(std::chrono::milliseconds patience) noexcept;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  // Unique to the world; empty until it is known (a world that was adopted: the first group names
  // it).
  const std::string& id() const noexcept { return id_; }

  // Tells of what comes over TCP; null in a world that was adopted.
  const std::shared_ptr<Arrivals>& arrivals() const noexcept { return arrivals_; }

 private:
  // Waits for every rank of the world to call this; false when the deadline came first.
  bool meet(Deadline deadline);

  World(const MpiLibrary& library, std::string id, const std::string& origin,
        std::shared_ptr<Arrivals> arrivals = nullptr,
        std::shared_ptr<PmiResponder> responder = nullptr);

  const ForkGuard fork_;
  const Api& mpi_;
  const std::shared_ptr<Arrivals> arrivals_;
  const std::shared_ptr<PmiResponder> responder_;  // answers MPI_Finalize
  std::string id_;
  const int rank_;
  const int size_;
};

}  // namespace hbm::mpi
