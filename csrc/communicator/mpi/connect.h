// Connects, between nodes, a group whose ranks have met in the store: over MPI, or over TCP links
// if its ranks share no MPI world. Not called for groups within one node, unless their transport is
// kMpi.
//
// Threads: called once for each group, by the thread that creates it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "communicator/mpi/arrivals.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/preconditions.h"
#include "communicator/tcp/links.h"

namespace hbm::communicator::mpi {

// A rank's MPI world and its environment, before its group has a communicator.
struct MpiState {
  std::string node;       // equal on ranks that MPI may take as sharing a node
  std::string new_world;  // the name of a world that this rank would form
  std::string world_id;   // of its MPI world; empty: no world, or one that hbm has not formed
  int world_rank = -1;    // -1: MPI is not initialised
  int world_size = 0;
  SharingFacts sharing;
  uint64_t group_number = 0;  // random; the group's messages have rank 0's number
  std::string risks;          // risky_variables()
};

// Encodes the state as one line, which decode() reads.
std::string encode(const MpiState& state);
MpiState decode(const std::string& record);

// How the MPI worlds of a group's ranks are related.
enum class CommonWorld {
  kOne,   // all ranks are in one existing world
  kNone,  // no rank has a world
  kApart  // several worlds, or only some ranks have one
};

// A world that hbm has not formed has no id: only its size and its ranks are compared. So ranks of
// two jobs of the same size may pass for ranks of one world, and making the communicator then fails
// at the deadline.
CommonWorld common_world(const std::vector<MpiState>& ranks);

// Returns true if MPI may use shared memory for messages to `rank` from ranks of other nodes. Such
// messages wake no sleeping rank (arrivals.h). `node_of`: by rank.
bool nodes_share_memory(const std::vector<MpiState>& ranks, const std::vector<int>& node_of,
                        size_t rank);

// Returns the node of each rank. Nodes are numbered in the order of their first ranks.
std::vector<int> nodes_of(const std::vector<MpiState>& ranks);

// Returns the variables that make a trial of MPI_Init necessary, as in "rank 1: UCX_TLS=rc". The
// text does not name the ranks if all ranks have the same variables. Returns an empty text if no
// rank has such a variable.
std::string risks_of(const std::vector<MpiState>& ranks);

// Returns a name for the memory that this process can share through MPICH. It is made of the
// kernel's boot id, /dev/shm, the PID and user namespaces, the user, and HBMCOMM_NODE_ID, which
// forces ranks of one machine apart. (MPICH reads the memory of a peer by its PID.)
std::string node_key();

// A group's connection between nodes.
struct MpiConnection {
  std::shared_ptr<Comm> communicator;
  std::vector<int> world_ranks;        // of the group's ranks; empty: over TCP links
  std::shared_ptr<tcp::Links> links;   // null: over MPI
  uint64_t group_number = 0;           // unique among the groups of these processes
  std::shared_ptr<Arrivals> arrivals;  // of the carrier; null: unknown
  // True: `arrivals` ends this rank's sleep when a message from another node arrives.
  bool wakes = false;
};

// Connects a group whose ranks have met: in the MPI world of its ranks, or in a new world if they
// have none. If they have several worlds, or only some have one, connects them by TCP links and
// leaves MPI alone. All ranks call it. In a new world, MPI takes ranks as sharing a node if their
// node_key() and their number in `node_of` are equal. `node_of`: the node of each rank, equal on
// all ranks; empty if unknown.
//
// Throws Error(kUnavailable), with a remedy, if a rank has no MPI library, or if MPI would end the
// processes (preconditions.h). Throws Error(kTimeout) naming ranks that do not come, or cannot be
// reached.
MpiConnection connect(const bootstrap::Rendezvous& rendezvous, const std::vector<int>& node_of);

// Returns a communicator of some ranks of a connected group, in that order. Only these ranks call
// it. Throws Error(kTimeout) if a rank does not come before the deadline.
std::shared_ptr<Comm> connect_some(const bootstrap::Rendezvous& rendezvous,
                                   const MpiConnection& group, const std::vector<int>& ranks);

}  // namespace hbm::communicator::mpi
