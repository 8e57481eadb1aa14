#include "communicator/shm/peer_socket.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/socket_files.h"

namespace hbm::communicator::shm {
namespace {

constexpr size_t kMostDescriptors = 4;  // in a packet
constexpr int kOptions = SOCK_CLOEXEC | SOCK_NONBLOCK;

using ControlBuffer = std::array<std::byte, CMSG_SPACE(kMostDescriptors * sizeof(int))>;

[[noreturn]] void failed(ErrorKind kind, const std::string& what) {
  throw Error(kind, what + ": " + std::strerror(errno));
}

SocketAddress address_of(const std::string& text) {
  SocketAddress address;
  if (text.size() > kLongestAddress) {
    throw Error(ErrorKind::kInvalid, "\"" + text + "\" is too long for the name of a socket (" +
                                         std::to_string(text.size()) + " bytes, at most " +
                                         std::to_string(kLongestAddress) +
                                         "); choose a shorter HBMCOMM_SOCKET_DIR");
  }
  address.name.sun_family = AF_UNIX;
  std::memcpy(address.name.sun_path, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  return address;
}

Descriptor make_socket() {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | kOptions, 0));
  if (!made) failed(ErrorKind::kUnavailable, "cannot make a Unix socket");
  return made;
}

const sockaddr* raw(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.name);
}

constexpr const char* kPrefix = "hbmcomm-";
constexpr const char* kSuffix = ".socket";
// A file gets its final name when its process listens. A file with this suffix may refuse calls for
// a moment.
constexpr const char* kDraft = ".draft";

std::string path_of(const std::string& directory, const std::string& name) {
  return directory + "/" + kPrefix + name + kSuffix;
}

bool abandoned(const std::filesystem::path& file) {
  const std::string name = file.filename();
  return name.starts_with(kPrefix) && name.find(kSuffix) != std::string::npos &&
         refuses_calls(file, SOCK_SEQPACKET) && (file.extension() != kDraft || past_start(file));
}

}  // namespace

SocketAddress abstract_address(const std::string& name) { return address_of('\0' + name); }

SocketAddress file_address(const std::string& path) {
  SocketAddress address = address_of(path);
  ++address.length;  // includes the terminating null
  return address;
}

Descriptor listen_at(const SocketAddress& address) {
  Descriptor made = make_socket();
  if (bind(made.get(), raw(address), address.length) != 0 || listen(made.get(), SOMAXCONN) != 0) {
    const std::string path = address.name.sun_path;  // empty for an abstract name
    failed(ErrorKind::kUnavailable,
           "cannot listen on a Unix socket" + (path.empty() ? path : " at " + path));
  }
  return made;
}

Descriptor accept_at(int listener) {
  for (;;) {
    Descriptor taken(accept4(listener, nullptr, nullptr, kOptions));
    if (taken || errno == EAGAIN) return taken;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    failed(ErrorKind::kUnavailable, "cannot take in a call from another rank of this node");
  }
}

Descriptor connect_to(const SocketAddress& address, std::error_code& failure) {
  Descriptor made = make_socket();
  while (::connect(made.get(), raw(address), address.length) != 0) {
    if (errno == EINTR) continue;
    failure.assign(errno, std::generic_category());
    return {};
  }
  failure.clear();
  return made;
}

bool trusted(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == geteuid();
}

Delivery send(int socket, const void* data, size_t bytes, const std::vector<int>& descriptors,
              std::string& cause) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const size_t length = descriptors.size() * sizeof(int);
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(length);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(length);
  std::memcpy(CMSG_DATA(header), descriptors.data(), length);
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ETOOMANYREFS) return Delivery::kLater;
    if (errno == EPIPE || errno == ECONNRESET) {
      cause = std::string("sending failed: ") + std::strerror(errno);
      return Delivery::kGone;
    }
    failed(ErrorKind::kNetwork, "cannot pass descriptors to another rank of this node");
  }
  return Delivery::kDone;
}

Delivery receive(int socket, void* data, size_t bytes, std::vector<Descriptor>& descriptors,
                 std::string& cause) {
  iovec part{data, bytes};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr message{};
  ssize_t got = 0;
  // The kernel checks for a packet first, and then for the end of the connection. The peer may send
  // its packet and close the connection between the two checks. So the end counts at the second
  // call.
  for (int calls = 0; calls < 2 && got == 0; ++calls) {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    while ((got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return Delivery::kLater;
      if (errno == ECONNRESET) {
        cause = std::string("receiving failed: ") + std::strerror(errno);
        return Delivery::kGone;
      }
      failed(ErrorKind::kNetwork, "cannot receive from another rank of this node");
    }
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(received);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(ErrorKind::kExhausted,
                "cannot take the descriptors that another rank of this node passed: this process "
                "has too many open files (ulimit -n)");
  }
  if (static_cast<size_t>(got) == bytes && (message.msg_flags & MSG_TRUNC) == 0) {
    return Delivery::kDone;
  }
  cause = got == 0 ? "it closed the connection"
                   : "it sent a packet of another size than " + std::to_string(bytes) + " bytes";
  return Delivery::kGone;
}

SocketFile::SocketFile(const std::string& directory, const std::string& name)
    : path_(path_of(directory, name)) {
  sweep_sockets(directory, abandoned);
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

}  // namespace hbm::communicator::shm
