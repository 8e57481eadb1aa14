// Unix sockets between processes of one machine. Their packets can carry descriptors. No function
// blocks.
//
// Threads: any thread may call every function; each socket is used by one thread at a time.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>
#include <system_error>
#include <vector>

#include "base/descriptor.h"

namespace hbm::communicator::shm {

inline constexpr size_t kLongestAddress = sizeof(sockaddr_un::sun_path) - 1;

struct SocketAddress {
  sockaddr_un name{};
  socklen_t length = 0;
};

// Returns an address without a file. The address is visible only in this network namespace, and
// disappears with its socket. Throws Error(kInvalid) if the name is too long for the kernel, as
// file_address() does.
SocketAddress abstract_address(const std::string& name);
SocketAddress file_address(const std::string& path);

// Throws Error(kUnavailable) if the kernel refuses.
Descriptor listen_at(const SocketAddress& address);

// Accepts a caller. Returns no descriptor if no caller waits.
Descriptor accept_at(int listener);

// Connects to a listener. Returns no descriptor, and sets `failure`, if no process listens at the
// address.
Descriptor connect_to(const SocketAddress& address, std::error_code& failure);

// Returns true if the process at the other end runs as the same user as this process. The result is
// the same at both ends.
bool trusted(int socket);

enum class Delivery { kDone, kLater, kGone };

// Sends one packet with copies of `descriptors`. Returns kLater if the kernel has no room for the
// packet now. Returns kGone, and sets `cause`, if no process will receive the packet. Throws
// Error(kNetwork) on any other failure, as receive() does.
Delivery send(int socket, const void* data, size_t bytes, const std::vector<int>& descriptors,
              std::string& cause);

// Receives one packet of exactly `bytes`, and its descriptors. Returns kLater if no packet has
// arrived. Returns kGone, and sets `cause`, if no packet will arrive or if the packet has another
// size. Throws Error(kExhausted) if this process cannot hold the descriptors.
Delivery receive(int socket, void* data, size_t bytes, std::vector<Descriptor>& descriptors,
                 std::string& cause);

class SocketFile {
 public:
  // Listens at a file in `directory`. Also removes the files of killed listeners there. Throws
  // Error(kUnavailable) if the kernel refuses the file, and Error(kInvalid) if the path is too
  // long.
  SocketFile(const std::string& directory, const std::string& name);
  ~SocketFile();  // removes the file
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

  int listener() const noexcept { return listener_.get(); }

 private:
  const std::string path_;
  Descriptor listener_;
};

// Connects to the SocketFile of another process; see connect_to().
Descriptor connect_to_file(const std::string& directory, const std::string& name,
                           std::error_code& failure);

}  // namespace hbm::communicator::shm
