#include "communicator/mpi/segments.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace hbm::communicator::mpi {
namespace {

constexpr const char* kOfMpich = "/dev/shm/mpich_";
constexpr const char* kOfUcx = "/dev/shm/ucx_shm_posix_";

void unlink_mapped(const std::string& process, const char* prefix) {
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find(prefix);
    if (path != std::string::npos) unlink(line.c_str() + path);
  }
}

void unlink_open(const std::string& process, const char* prefix) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + process + "/fd", error)) {
    const std::string path = std::filesystem::read_symlink(entry.path(), error).string();
    if (path.rfind(prefix, 0) == 0) unlink(path.c_str());
  }
}

}  // namespace

void unlink_segments() noexcept try {
  unlink_mapped("self", kOfMpich);
} catch (const std::exception&) {  // no memory
}

void unlink_segments_of(pid_t child) noexcept try {
  const std::string process = std::to_string(child);
  for (const char* prefix : {kOfMpich, kOfUcx}) {
    unlink_mapped(process, prefix);
    unlink_open(process, prefix);
  }
} catch (const std::exception&) {  // no memory, or the process has ended
}

}  // namespace hbm::communicator::mpi
