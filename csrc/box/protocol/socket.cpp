#include "box/protocol/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/tcp.h"
#include "box/protocol/tuning.h"

namespace hbm::box::protocol {
namespace {

constexpr int kFlags = SOCK_CLOEXEC | SOCK_NONBLOCK;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string reason(int failure) { return std::strerror(failure); }

Addresses resolve(const Address& address, int flags, ErrorKind kind) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(address.host.empty() ? nullptr : address.host.c_str(),
                                  std::to_string(address.port).c_str(), &hints, &found);
  if (failure != 0) {
    throw Error(kind, "cannot find the host of " + address.host_and_port() + ": " +
                          (failure == EAI_SYSTEM ? reason(errno) : gai_strerror(failure)));
  }
  return {found, &freeaddrinfo};
}

sockaddr_un unix_name(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof(name.sun_path)) {
    throw Error(ErrorKind::kInvalid, "\"" + path + "\" is too long for the name of a socket (" +
                                         std::to_string(path.size()) + " bytes, at most " +
                                         std::to_string(sizeof(name.sun_path) - 1) + ")");
  }
  std::memcpy(name.sun_path, path.data(), path.size());
  return name;
}

// Returns false if the peer has gone.
bool get_peer(int socket, sockaddr_storage& name) {
  socklen_t length = sizeof(name);
  return getpeername(socket, reinterpret_cast<sockaddr*>(&name), &length) == 0;
}

// An IPv4 client of a socket of IPv6 has its IPv4 address.
std::string host_of(const sockaddr_storage& name) {
  char host[NI_MAXHOST];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&name), sizeof(name), host, sizeof(host),
                  nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  const std::string_view mapped = "::ffff:";
  const bool ipv4 = name.ss_family == AF_INET6 &&
                    IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6&>(name).sin6_addr);
  return ipv4 ? host + mapped.size() : host;
}

uint16_t port_of(const sockaddr_storage& name) {
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(name).sin_port);
}

void set(int socket, int level, int option, int value) noexcept {
  // These options cannot fail on a TCP socket; a failure would not justify closing it.
  static_cast<void>(setsockopt(socket, level, option, &value, sizeof(value)));
}

void tune(int socket) noexcept {
  const auto count = [](auto time) { return static_cast<int>(time.count()); };
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, count(kKeepaliveIdle));
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, count(kKeepaliveProbePeriod));
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, count(kUnacknowledgedTimeout));
}

// Returns 0 or the errno.
int finish_connecting(int socket, const sockaddr* name, socklen_t length, Deadline deadline) {
  if (connect(socket, name, length) == 0) return 0;
  if (errno == EAGAIN) return EAGAIN;  // the queue of the Unix listener is full
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  if (!wait_for(socket, POLLOUT, deadline)) return ETIMEDOUT;
  int failure = 0;
  socklen_t size = sizeof(failure);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &failure, &size) == 0 ? failure : errno;
}

Descriptor try_connect(int family, const sockaddr* name, socklen_t length, Deadline deadline,
                       int& failure) {
  for (;;) {
    Descriptor made(socket(family, SOCK_STREAM | kFlags, 0));
    failure = made ? finish_connecting(made.get(), name, length, deadline) : errno;
    if (failure == 0) return made;
    if (failure != EAGAIN) return {};
    if (std::chrono::steady_clock::now() >= deadline) failure = ETIMEDOUT;
    if (failure == ETIMEDOUT) return {};
    std::this_thread::sleep_for(kFullBacklogPause);
  }
}

Descriptor listen_unix(const std::string& path, mode_t file_mode) {
  const sockaddr_un name = unix_name(path);
  const auto* raw = reinterpret_cast<const sockaddr*>(&name);
  const std::string what = "cannot listen on the Unix socket " + path;
  int failure = 0;
  struct stat there{};
  if (lstat(path.c_str(), &there) == 0) {
    if (!S_ISSOCK(there.st_mode)) {
      throw Error(ErrorKind::kUnavailable, what + ": there is a file that is no socket");
    }
    const Descriptor probe(socket(AF_UNIX, SOCK_STREAM | kFlags, 0));
    if (connect(probe.get(), raw, sizeof(name)) == 0 || errno == EAGAIN) {
      throw Error(ErrorKind::kUnavailable, what + ": another process listens there");
    }
    if (errno == ECONNREFUSED) unlink(path.c_str());
  }
  Descriptor made(socket(AF_UNIX, SOCK_STREAM | kFlags, 0));
  if (!made || bind(made.get(), raw, sizeof(name)) != 0) {
    throw Error(ErrorKind::kUnavailable, what + ": " + reason(errno));
  }
  // Set the mode before listen(): no client may connect under a wider mode.
  if (chmod(path.c_str(), file_mode) != 0 || listen(made.get(), SOMAXCONN) != 0) {
    failure = errno;
    unlink(path.c_str());
    throw Error(ErrorKind::kUnavailable, what + ": " + reason(failure));
  }
  return made;
}

Descriptor listen_tcp(const Address& address) {
  Address wanted = address;
  if (wanted.host.empty()) wanted.host = "::";
  const Addresses found = resolve(wanted, AI_PASSIVE, ErrorKind::kUnavailable);
  int failure = 0;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    Descriptor made = listen_tcp_at(one->ai_addr, one->ai_addrlen, address.host.empty());
    if (made) return made;
    failure = errno;
  }
  if (address.host.empty() && (failure == EAFNOSUPPORT || failure == EADDRNOTAVAIL)) {
    return listen_tcp({"0.0.0.0", address.port, ""});  // a machine without IPv6
  }
  throw Error(ErrorKind::kUnavailable,
              "cannot listen on " + address.host_and_port() + ": " +
                  (address.port == 0 ? listening_error(failure) : reason(failure)));
}

}  // namespace

Descriptor listen_at(const Address& address, mode_t file_mode) {
  return address.is_unix() ? listen_unix(address.path, file_mode) : listen_tcp(address);
}

uint16_t local_port(int socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    throw Error(ErrorKind::kUnavailable, "cannot find a socket's port: " + reason(errno));
  }
  if (name.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&name)->sin_port);
  }
  if (name.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&name)->sin6_port);
  }
  return 0;
}

Descriptor accept_from(int listener, int& failure) noexcept {
  for (;;) {
    sockaddr_storage name{};
    socklen_t length = sizeof(name);
    Descriptor taken(accept4(listener, reinterpret_cast<sockaddr*>(&name), &length, kFlags));
    failure = taken ? 0 : errno;
    if (failure == EINTR || failure == ECONNABORTED) continue;
    if (taken && name.ss_family != AF_UNIX) tune(taken.get());
    return taken;
  }
}

Descriptor connect_to(const Address& address, Deadline deadline) {
  int failure = 0;
  if (address.is_unix()) {
    const sockaddr_un name = unix_name(address.path);
    Descriptor made = try_connect(AF_UNIX, reinterpret_cast<const sockaddr*>(&name), sizeof(name),
                                  deadline, failure);
    if (made) return made;
  } else {
    const Addresses found = resolve(address, 0, ErrorKind::kNetwork);
    for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
      Descriptor made =
          try_connect(one->ai_family, one->ai_addr, one->ai_addrlen, deadline, failure);
      if (!made) continue;
      tune(made.get());
      return made;
    }
  }
  throw Error(ErrorKind::kNetwork,
              "cannot connect to the box at " + address.url() + ": " + reason(failure));
}

bool wait_for(int socket, short events, Deadline deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto most = std::clamp<int64_t>(left.count(), 0, 1 << 30);
    pollfd asked{socket, events, 0};
    const int ready = poll(&asked, 1, static_cast<int>(most));
    if (ready > 0) return true;
    if (ready == 0 && left.count() <= most) return false;
    if (ready < 0 && errno != EINTR) {
      throw Error(ErrorKind::kNetwork, "cannot wait for a socket: " + reason(errno));
    }
  }
}

std::optional<uid_t> peer_user(int socket) noexcept {
  ucred peer{};
  socklen_t length = sizeof(peer);
  int domain = 0;
  socklen_t domain_length = sizeof(domain);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &domain_length) != 0 ||
      domain != AF_UNIX || getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return std::nullopt;
  }
  return peer.uid;
}

std::string peer_name(int socket) {
  sockaddr_storage name{};
  if (!get_peer(socket, name)) return "a client that has gone";
  if (name.ss_family != AF_UNIX) {
    const std::string host = host_of(name);
    return host.empty() ? "a client without a name" : with_port(host, port_of(name));
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return "a local process";
  return "process " + std::to_string(peer.pid) + " of user " + std::to_string(peer.uid);
}

std::string peer_host(int socket) {
  sockaddr_storage name{};
  if (!get_peer(socket, name)) return "";
  return name.ss_family == AF_UNIX ? "local" : host_of(name);
}

}  // namespace hbm::box::protocol
