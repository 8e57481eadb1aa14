// The ranks of a new group meet in the store, before anything that could hang: each says who it is
// and waits for the others, so that whoever is missing is named.
//
// Threads: called once per group, by the thread that creates it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/key_value.h"
#include "mpi/communicator.h"
#include "mpi/world.h"

namespace hbm::mpi {

// What a rank says of itself.
struct Member {
  std::string version;  // of torch_hbmcomm
  std::string host;
  long pid = 0;
  std::string node;         // equal on ranks that share memory, see node_key()
  std::string chunk_bytes;  // must be equal on all ranks
  std::string problem;      // why it cannot take part; empty if it can
  std::string world_id;     // of its MPI world; empty: none, or one that has no name yet
  int world_rank = -1;      // -1: MPI is not initialised
  int world_size = 0;
};

// Names the memory that this process can share: the kernel's boot, its /dev/shm, its PID and user
// namespaces (within a node MPICH reads a peer's memory, by PID), and HBMCOMM_NODE_ID (which forces
// ranks of one machine apart).
std::string node_key();

// This process' own record. Loads the MPI library if `needs_mpi`; a failure goes into `problem`, so
// that no rank waits for one that cannot come.
Member introduce(const std::string& version, size_t chunk_bytes, bool needs_mpi);

struct Meeting {
  std::vector<Member> members;
  std::string prefix;  // of keys that belong to this meeting alone
};

// Exchanges records. Throws Error(kTimeout) naming the ranks that did not come, Error(kUnavailable)
// when one cannot take part, Error(kMismatch) when versions or chunk sizes differ. `store` is the
// group's own; a second meeting of the same ranks in the same store is told from the first.
Meeting meet(KeyValue& store, const Member& self, int rank, int size, const std::string& group,
             Deadline deadline);

// Numbers the nodes by their first rank: node_of[r].
std::vector<int> nodes_of(const std::vector<Member>& members);

// The communicator of a group that has met: out of the world that its ranks share, or of a new one
// if they have none. Throws Error(kUnavailable), saying what to do, if the group fits no world.
std::shared_ptr<Communicator> connect(std::shared_ptr<KeyValue> store,
                                      const std::vector<Member>& members, int rank,
                                      const std::string& group, Deadline deadline);

}  // namespace hbm::mpi
