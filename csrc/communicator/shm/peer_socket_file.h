// A listening socket with a name in the file system: for peers in other network namespaces
// (containers) with which this process shares a directory.
//
// Threads: none of its own; used by one at a time.
#pragma once

#include <string>
#include <system_error>

#include "base/descriptor.h"
#include "communicator/shm/peer_socket.h"

namespace hbm::shm {

// HBMCOMM_SOCKET_DIR, or /dev/shm, which containers with shared memory between them share.
std::string socket_directory();

class SocketFile {
 public:
  // Also removes the files of listeners in `directory` that were killed.
  // Throws Error(kUnavailable) when the file cannot be made there.
  SocketFile(const std::string& directory, const std::string& name);
  ~SocketFile();  // removes the file
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

  int listener() const noexcept { return listener_.get(); }

 private:
  const std::string path_;
  Descriptor listener_;
};

// Calls the SocketFile of another process; see connect_to().
Descriptor connect_to_file(const std::string& directory, const std::string& name,
                           std::error_code& failure);

}  // namespace hbm::shm
