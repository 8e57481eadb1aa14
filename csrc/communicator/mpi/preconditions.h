// Looks for what would make MPICH end the process: within a machine its layers copy through shared
// memory, and where that fails they abort, or meet SIGBUS. Asked before MPI is initialised.
//
// Threads: every function may be called from any thread that nobody changes the environment beside.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hbm::mpi {

// The facts of one rank that decide what memory it can share.
struct SharingFacts {
  unsigned user = 0;       // effective
  std::string boot_id;     // of the kernel
  std::string namespaces;  // of PIDs and of System V's IPC, through which UCX shares memory
  std::string shm_folder;  // which /dev/shm
  std::string access;      // group id and namespace of users: UCX opens memory of equal ones alone
  bool shares = true;  // UCX may use shared memory: neither UCX_TLS nor another layer forbids it
};

SharingFacts own_sharing_facts();

// Throws Error(kUnavailable), the same on every rank, when ranks of one machine belong to different
// users and would be made to share memory. `ranks` is by group rank.
void require_one_user(const std::vector<SharingFacts>& ranks, const std::string& group);

// Returns true if another rank of `rank`'s machine cannot open its memory. UCX would try, print an
// error and continue over the network.
bool is_shut_out(const std::vector<SharingFacts>& ranks, int rank);

// How many of them make their segments in the /dev/shm of `rank`.
size_t sharing_shm_folder(const std::vector<SharingFacts>& ranks, int rank);

// Throws Error(kUnavailable) unless /dev/shm has room for the segments of `ranks` ranks, and this
// process can make files there.
void require_shm_room(size_t ranks);

// Throws Error(kUnavailable) unless this process can open enough files for a world of `ranks`.
void require_descriptors(size_t ranks);

// Throws Error(kUnavailable) if this machine's name is too long for MPI.
void require_host_name();

// All three: `world` ranks in all, `sharing` of them with this /dev/shm.
void require_start(size_t world, size_t sharing);

}  // namespace hbm::mpi
