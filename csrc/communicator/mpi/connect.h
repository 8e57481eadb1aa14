// Gets a group that has met its MPI communicator. Called only for groups that need MPI.
//
// Threads: called once per group, by the thread that creates it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/arrivals.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/preconditions.h"

namespace hbm::mpi {

// Where a rank stands with MPI before its group has a communicator.
struct MpiState {
  std::string node;       // equal on ranks that MPI may take as sharing a node
  std::string new_world;  // what this rank would call a world that it had to make
  std::string world_id;   // of its MPI world; empty: none, or one that has no name yet
  int world_rank = -1;    // -1: MPI is not initialised
  int world_size = 0;
  SharingFacts sharing;
  uint64_t group_number = 0;  // random: what the group's messages bear if this is rank 0
  std::string risks;          // risky_variables()
};

// Writes the state as one line; decode() reads it.
std::string encode(const MpiState& state);
MpiState decode(const std::string& record);

// True if all ranks are in one world that exists; false if none has a world. Throws
// Error(kUnavailable), saying what to do, if they fit neither.
bool share_a_world(const std::vector<MpiState>& ranks, const std::string& group);

// Whether MPI may carry messages to `rank` through shared memory from ranks of other nodes;
// `node_of` by rank.
bool nodes_share_memory(const std::vector<MpiState>& ranks, const std::vector<int>& node_of,
                        size_t rank);

// Numbers the nodes by their first rank: node_of[r].
std::vector<int> nodes_of(const std::vector<MpiState>& ranks);

// Names the variables because of which MPI_Init is tried first, as in "rank 1: UCX_TLS=rc", or
// without ranks where they are equal on all; empty if no rank has any.
std::string risks_of(const std::vector<MpiState>& ranks);

// Names the memory that this process can share through MPICH: the kernel's boot, its /dev/shm, its
// PID and user namespaces (within a node MPICH reads a peer's memory, by PID), the user, and
// HBMCOMM_NODE_ID
// (which forces ranks of one machine apart).
std::string node_key();

// A group's place in the MPI world of its ranks.
struct MpiConnection {
  std::shared_ptr<Comm> communicator;
  std::vector<int> world_ranks;  // of the group's ranks
  uint64_t group_number = 0;     // no other group of these processes has it
  // Tells of what comes from other nodes; null if nothing does.
  std::shared_ptr<Arrivals> arrivals;
};

// The connection of a group that has met: out of the world that its ranks share, or of a new one
// if they have none. All ranks call it. For a new world, MPI takes ranks as sharing a node if their
// node_key() and their number in `node_of` (equal on all ranks; empty: not known) are equal.
//
// Throws Error(kUnavailable), saying what to do, if some rank has no MPI library, the group fits no
// world, or MPI would end the processes (preconditions.h), Error(kTimeout) naming ranks that do not
// come.
MpiConnection connect(const bootstrap::Rendezvous& rendezvous, const std::vector<int>& node_of);

// A communicator of some ranks of a connected group, in that order. They alone call it. Throws
// Error(kTimeout).
std::shared_ptr<Comm> connect_some(const bootstrap::Rendezvous& rendezvous,
                                   const MpiConnection& group, const std::vector<int>& ranks);

}  // namespace hbm::mpi
