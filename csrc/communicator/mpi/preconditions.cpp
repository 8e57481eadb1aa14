#include "communicator/mpi/preconditions.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <sstream>

#include "base/boot_id.h"
#include "base/error.h"

namespace hbm::mpi {
namespace {

constexpr const char* kShm = "/dev/shm";
constexpr uint64_t kSegmentBytes = 1'088'000;  // of a rank; MPICH 5.0 takes 1,061,440

std::string identity(const char* path) {
  struct stat found{};
  stat(path, &found);  // zeros where there is none
  return std::to_string(found.st_dev) + ":" + std::to_string(found.st_ino);
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether the transports that UCX may choose from share memory.
bool ucx_shares() {
  if (variable("MPIR_CVAR_CH4_NETMOD") == "ofi") return false;
  const std::string chosen = variable("UCX_TLS");
  if (chosen.empty() || chosen.front() == '^') return true;
  constexpr std::array kSharing = {"all",  "sm",    "shm",  "mm", "posix",
                                   "sysv", "xpmem", "knem", "cma"};
  std::istringstream names(chosen);
  for (std::string name; std::getline(names, name, ',');) {
    if (std::find(kSharing.begin(), kSharing.end(), name) != kSharing.end()) return true;
  }
  return false;
}

}  // namespace

SharingFacts own_sharing_facts() {
  return {.user = geteuid(),
          .boot_id = boot_id(),
          .namespaces = identity("/proc/self/ns/pid") + "," + identity("/proc/self/ns/ipc"),
          .shm_folder = identity(kShm),
          .shares = ucx_shares()};
}

void require_one_user(const std::vector<SharingFacts>& ranks, const std::string& group) {
  for (size_t b = 1; b < ranks.size(); ++b) {
    for (size_t a = 0; a < b; ++a) {
      const SharingFacts& one = ranks[a];
      const SharingFacts& other = ranks[b];
      if (one.user == other.user || one.boot_id != other.boot_id ||
          one.namespaces != other.namespaces || !(one.shares || other.shares)) {
        continue;
      }
      throw Error(ErrorKind::kUnavailable,
                  "ranks " + std::to_string(a) + " and " + std::to_string(b) + " of " + group +
                      " run on one machine as different users (" + std::to_string(one.user) +
                      " and " + std::to_string(other.user) +
                      "), who cannot share memory, and MPI would try to and end both processes. "
                      "Run all ranks of a machine as one user, or start every rank with "
                      "UCX_TLS=tcp,self");
    }
  }
}

size_t sharing_shm_folder(const std::vector<SharingFacts>& ranks, int rank) {
  const SharingFacts& own = ranks[static_cast<size_t>(rank)];
  return static_cast<size_t>(std::count_if(ranks.begin(), ranks.end(), [&](const auto& other) {
    return other.boot_id == own.boot_id && other.shm_folder == own.shm_folder;
  }));
}

void require_shm_room(size_t ranks) {
  struct statvfs state{};
  if (statvfs(kShm, &state) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("there is no ") + kShm +
                    ", in which MPI makes its shared memory: mount a tmpfs there");
  }
  const uint64_t room = uint64_t{state.f_bavail} * state.f_frsize;
  const uint64_t needed = ranks * kSegmentBytes;
  // A tmpfs without a limit says 0 of everything.
  if (state.f_blocks == 0 || room >= needed) return;
  throw Error(ErrorKind::kUnavailable,
              std::string(kShm) + " has " + std::to_string(room >> 10) +
                  " KiB left, and MPI needs " + std::to_string(needed >> 10) + " KiB there for " +
                  std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") +
                  "; without, it would end them by SIGBUS. Mount a larger one (docker run "
                  "--shm-size 1g; mount -o remount,size=1g /dev/shm), or remove what lies there");
}

}  // namespace hbm::mpi
