#include "communicator/mpi/preconditions.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/boot_id.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "bootstrap/rendezvous.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

constexpr const char* kShm = "/dev/shm";

std::string identity(const char* path) {
  struct stat found{};
  stat(path, &found);  // zeros if it does not exist
  return std::to_string(found.st_dev) + ":" + std::to_string(found.st_ino);
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns true if UCX may choose a transport that shares memory.
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

void require_shm_writable() {
  const std::string path = std::string(kShm) + "/hbmcomm_" + bootstrap::random_id();
  const Descriptor file(
      open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  int error = file ? 0 : errno;
  if (file) {
    unlink(path.c_str());
    if (write(file.get(), "", 1) != 1) error = errno;
  }
  if (error == 0) return;
  throw Error(ErrorKind::kUnavailable,
              std::string("cannot make a file in ") + kShm +
                  ", in which MPI makes its shared "
                  "memory: " +
                  std::strerror(error) + ". Let user " + std::to_string(geteuid()) +
                  " write there (mount -o remount,rw "
                  "/dev/shm; chmod 1777 /dev/shm), or mount a tmpfs there");
}

}  // namespace

SharingFacts own_sharing_facts() {
  return {.user = geteuid(),
          .boot_id = boot_id(),
          .namespaces = identity("/proc/self/ns/pid") + "," + identity("/proc/self/ns/ipc"),
          .shm_directory = identity(kShm),
          .access = std::to_string(getegid()) + "," + identity("/proc/self/ns/user"),
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

bool is_shut_out(const std::vector<SharingFacts>& ranks, int rank) {
  const SharingFacts& own = ranks[static_cast<size_t>(rank)];
  return std::any_of(ranks.begin(), ranks.end(), [&](const auto& other) {
    return other.boot_id == own.boot_id && other.access != own.access;
  });
}

size_t sharing_shm_directory(const std::vector<SharingFacts>& ranks, int rank) {
  const SharingFacts& own = ranks[static_cast<size_t>(rank)];
  return static_cast<size_t>(std::count_if(ranks.begin(), ranks.end(), [&](const auto& other) {
    return other.boot_id == own.boot_id && other.shm_directory == own.shm_directory;
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
  const uint64_t needed = ranks * kShmBytesPerRank;
  // A tmpfs without a limit reports 0 blocks and files.
  if (state.f_blocks != 0 && room < needed) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string(kShm) + " has " + std::to_string(room >> 10) + " KiB left, and MPI needs " +
            std::to_string(needed >> 10) + " KiB there for " + std::to_string(ranks) +
            (ranks == 1 ? " rank" : " ranks") +
            "; without, it would end them by SIGBUS. Mount a larger one (docker run --shm-size "
            "1g; mount -o remount,size=1g /dev/shm), or remove what lies there");
  }
  const uint64_t files = ranks * kShmFilesPerRank;
  if (state.f_files != 0 && state.f_ffree < files) {
    throw Error(ErrorKind::kUnavailable,
                std::string(kShm) + " has room for " + std::to_string(state.f_ffree) +
                    " more files (df -i), and MPI makes " + std::to_string(files) +
                    " there. Mount it with more inodes (mount -o remount,nr_inodes=0 /dev/shm), or "
                    "remove what lies there");
  }
  require_shm_writable();
}

void require_descriptors(size_t ranks) {
  const size_t needed = kDescriptorsOfWorld + ranks * kDescriptorsPerRank;
  std::vector<Descriptor> opened;
  while (opened.size() < needed) {
    const int next = eventfd(0, EFD_CLOEXEC);
    if (next < 0) break;
    opened.emplace_back(next);
  }
  if (opened.size() == needed) return;
  const int error = errno;
  throw Error(ErrorKind::kUnavailable,
              "this process can open " + std::to_string(opened.size()) +
                  " more files, and MPI may open " + std::to_string(needed) + " for " +
                  std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + ": " +
                  std::strerror(error) +
                  ". Raise the limit of open files (ulimit -n; docker run --ulimit nofile=4096)");
}

void require_host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  gethostname(name.data(), name.size());
  if (std::strlen(name.data()) < HOST_NAME_MAX) return;
  throw Error(ErrorKind::kUnavailable,
              "this machine's name has " + std::to_string(HOST_NAME_MAX) +
                  " characters, and MPI takes in one less: " + name.data() +
                  ". Give it a shorter name (hostname NAME; docker run --hostname NAME)");
}

void require_start(size_t world, size_t sharing) {
  require_host_name();
  require_descriptors(world);
  require_shm_room(sharing);
}

}  // namespace hbm::communicator::mpi
