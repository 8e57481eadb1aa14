#include "communicator/shm/peer_socket_file.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace hbm::shm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "hbmcomm-";
constexpr const char* kSuffix = ".socket";
// A file gets its final name once somebody listens there, so one with this suffix may be refused
// for a moment.
constexpr const char* kDraft = ".draft";
constexpr std::chrono::minutes kLongestDraft{1};

std::string path_of(const std::string& directory, const std::string& name) {
  return directory + "/" + kPrefix + name + kSuffix;
}

bool abandoned(const fs::path& path) {
  std::error_code failure;
  connect_to(file_address(path), failure);
  if (failure != std::errc::connection_refused) return false;
  if (path.extension() != kDraft) return true;
  const auto since = fs::last_write_time(path, failure);
  return !failure && fs::file_time_type::clock::now() - since > kLongestDraft;
}

// What cannot be read or removed belongs to somebody else.
void sweep(const std::string& directory) {
  std::error_code failure;
  for (fs::directory_iterator file(directory, failure), end; !failure && file != end;
       file.increment(failure)) {
    const fs::path& path = file->path();
    const std::string name = path.filename();
    if (!name.starts_with(kPrefix) || name.find(kSuffix) == std::string::npos) continue;
    if (path.native().size() <= kLongestAddress && abandoned(path)) unlink(path.c_str());
  }
}

}  // namespace

std::string socket_directory() {
  const char* chosen = std::getenv("HBMCOMM_SOCKET_DIR");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/dev/shm";
}

SocketFile::SocketFile(const std::string& directory, const std::string& name)
    : path_(path_of(directory, name)) {
  sweep(directory);
  const std::string draft = path_ + kDraft;
  listener_ = listen_at(file_address(draft));
  if (std::rename(draft.c_str(), path_.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    unlink(draft.c_str());
    throw Error(ErrorKind::kUnavailable, "cannot name the socket " + path_ + ": " + reason);
  }
}

SocketFile::~SocketFile() { unlink(path_.c_str()); }

Descriptor connect_to_file(const std::string& directory, const std::string& name,
                           std::error_code& failure) {
  return connect_to(file_address(path_of(directory, name)), failure);
}

}  // namespace hbm::shm
