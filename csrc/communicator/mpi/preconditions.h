// Checks the conditions under which MPICH would end the process. Within a machine MPICH's layers
// copy through shared memory; if that fails, they abort or get SIGBUS. Called before MPI is
// initialised.
//
// Threads: any thread may call every function. REQUIRES: no other thread changes the environment
// during a call.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hbm::communicator::mpi {

// The facts that decide which memory a rank can share.
struct SharingFacts {
  unsigned user = 0;          // effective user id
  std::string boot_id;        // of the kernel
  std::string namespaces;     // of PIDs and of System V's IPC, which UCX uses to share memory
  std::string shm_directory;  // identity of /dev/shm
  std::string access;         // group id, user namespace: UCX opens memory only if both are equal
  // True if UCX may use shared memory: UCX_TLS allows it, and no other layer replaces UCX.
  bool shares = true;
};

SharingFacts own_sharing_facts();

// Throws Error(kUnavailable), the same on every rank, if ranks of one machine belong to different
// users and MPI would make them share memory. `ranks`: by group rank.
void require_one_user(const std::vector<SharingFacts>& ranks, const std::string& group);

// Returns true if another rank of the same machine cannot open the memory of `rank`. UCX would try,
// print an error and continue over the network.
bool is_shut_out(const std::vector<SharingFacts>& ranks, int rank);

// Returns the number of ranks that use the /dev/shm of `rank`.
size_t sharing_shm_directory(const std::vector<SharingFacts>& ranks, int rank);

// Throws Error(kUnavailable) unless /dev/shm has room for the segments of `ranks` ranks and this
// process can make files there.
void require_shm_room(size_t ranks);

// Throws Error(kUnavailable) unless this process can open enough files for a world of `ranks`
// ranks.
void require_descriptors(size_t ranks);

// Throws Error(kUnavailable) if this machine's name is too long for MPI.
void require_host_name();

// Makes the three checks above. `world`: the number of ranks of the world. `sharing`: the number of
// ranks that use this /dev/shm.
void require_start(size_t world, size_t sharing);

}  // namespace hbm::communicator::mpi
