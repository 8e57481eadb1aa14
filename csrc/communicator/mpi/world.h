// The MPI world of this process; a process has at most one.
//
// The first group that needs MPI forms the world, unless a launcher or other code has initialised
// MPI already. The communicators of all groups are made from the world. The world exists until the
// process ends: MPI cannot be initialised twice, and MPI_Finalize hangs if a peer is dead or late.
//
// Threads: any thread may call every function. form(), launched() and current() exclude one
// another.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "bootstrap/key_value.h"
#include "communicator/mpi/api.h"
#include "communicator/mpi/arrivals.h"
#include "communicator/mpi/channel.h"

namespace hbm::communicator::mpi {

struct MpiLibrary;
class PmiResponder;

using Deadline = std::chrono::steady_clock::time_point;

class World {
 public:
  // Returns the world of this process; null if there is none. Takes over a world that other code
  // has initialised (mpi4py), without waiting for other ranks. Throws Error(kUnavailable) in a
  // forked child of the process that owns the world, and if the other code has finalised MPI or has
  // initialised it without MPI_THREAD_MULTIPLE.
  static World* current();

  // Forms a world of `size` processes through the PMI responder (pmi.h) and `store`. All `size`
  // processes call it, after they have met in the store. `id`: unique, and equal on all. `node_of`:
  // the node of each rank, as in process_mapping(). `risks`: equal on all; the variables because of
  // which MPI_Init is tried first (trial.h), empty if there are none. Calls `check` while it waits,
  // and passes on its exceptions, which name a rank that cannot come. Throws Error(kTimeout) at the
  // deadline. Throws Error(kUnavailable) without a library that speaks PMI-1, or if the trial
  // fails.
  static World& form(std::shared_ptr<bootstrap::KeyValue> store, const std::string& id, int rank,
                     int size, const std::vector<int>& node_of, Deadline deadline,
                     const std::function<void()>& check = {}, const std::string& risks = "");

  // Initialises MPI through the launcher that started this process (mpiexec, srun), unless MPI is
  // initialised already. Throws Error(kTimeout) if another rank does not come before the deadline.
  // Throws Error(kUnavailable) without a library that fits the launcher, or if a precondition fails
  // (preconditions.h).
  static World& launched(Deadline deadline);

  // Makes a communicator of the given world ranks, in that order. Only these ranks call it, after
  // they have met. `tag` distinguishes concurrent creations. `check`: as in form().
  std::shared_ptr<Comm> communicator(const std::vector<int>& world_ranks, int tag,
                                     Deadline deadline, const std::function<void()>& check = {});

  // Returns rank 0's `value` on every rank of the world. REQUIRES: all ranks call it. Throws
  // Error(kTimeout) if a rank does not call it before the deadline.
  std::string broadcast(std::string value, Deadline deadline);

  // Finalises MPI at the end of a launched process, if every rank calls this within `timeout`.
  // Otherwise leaves MPI initialised, and the process can exit without MPI_Finalize.
  void finalize_together(std::chrono::milliseconds timeout) noexcept;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  // Returns an id that is unique to the world. Empty if a launcher or other code has formed the
  // world: see form().
  const std::string& id() const noexcept { return id_; }

  // Returns the object by which threads sleep until a message arrives over TCP. Null in a world
  // that was taken over.
  const std::shared_ptr<Arrivals>& arrivals() const noexcept { return arrivals_; }

 private:
  // Waits for every rank of the world to call this. Returns false at the deadline.
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

}  // namespace hbm::communicator::mpi
