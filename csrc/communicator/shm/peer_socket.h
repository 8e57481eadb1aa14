// Unix sockets between processes of one machine, whose packets can carry descriptors. Nothing here
// blocks.
//
// Threads: all functions may be called from any thread, each socket used by one at a time.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>
#include <system_error>
#include <vector>

#include "base/descriptor.h"

namespace hbm::shm {

inline constexpr size_t kLongestAddress = sizeof(sockaddr_un::sun_path) - 1;

struct SocketAddress {
  sockaddr_un name{};
  socklen_t length = 0;
};

// A name without a file: seen within one network namespace, gone with its socket.
// Throws Error(kInvalid), as the next, when the text is too long for the kernel.
SocketAddress abstract_address(const std::string& name);
SocketAddress file_address(const std::string& path);

// Throws Error(kUnavailable) when the kernel refuses.
Descriptor listen_at(const SocketAddress& address);

// Takes a caller in; nothing when nobody is left who calls.
Descriptor accept_at(int listener);

// None, and why not in `failure`, when nobody listens there.
Descriptor connect_to(const SocketAddress& address, std::error_code& failure);

// Returns true if the process at the other end runs as this one's user. Both ends then agree.
bool trusted(int socket);

enum class Delivery { kDone, kLater, kGone };

// One packet with copies of `descriptors`. kLater: the kernel holds too much already; kGone: nobody
// will receive it. Throws Error(kNetwork) on any other failure, as does receive().
Delivery send(int socket, const void* data, size_t bytes, const std::vector<int>& descriptors);

// One packet of exactly `bytes`, and its descriptors. kGone: nothing will come any more. Throws
// Error(kExhausted) if this process cannot hold the descriptors.
Delivery receive(int socket, void* data, size_t bytes, std::vector<Descriptor>& descriptors);

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
