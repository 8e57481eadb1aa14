// From a group that has met to its communicator: called only for groups that need MPI.
//
// Threads: called once per group, by the thread that creates it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/comm.h"

namespace hbm::mpi {

// Names the memory that this process can share through MPICH: the kernel's boot, its /dev/shm, its
// PID and user namespaces (within a node MPICH reads a peer's memory, by PID), and HBMCOMM_NODE_ID
// (which forces ranks of one machine apart).
std::string node_key();

// A group's place in the MPI world of its ranks.
struct MpiConnection {
  std::shared_ptr<Comm> communicator;
  std::vector<int> world_ranks;  // of the group's ranks
};

// The connection of a group that has met: out of the world that its ranks share, or of a new one
// if they have none. All ranks call it. For a new world, MPI takes ranks as sharing a node if their
// node_key() and their number in `node_of` (equal on all ranks; empty: not known) are equal.
//
// Throws Error(kUnavailable), saying what to do, if some rank has no MPI library or the group fits
// no world, Error(kTimeout) naming ranks that do not come.
MpiConnection connect(const bootstrap::Rendezvous& rendezvous, const std::vector<int>& node_of);

// A communicator of some ranks of a connected group, in that order. They alone call it. Throws
// Error(kTimeout).
std::shared_ptr<Comm> connect_some(const bootstrap::Rendezvous& rendezvous,
                                   const MpiConnection& group, const std::vector<int>& ranks);

}  // namespace hbm::mpi
