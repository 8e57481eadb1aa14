#include "base/tcp.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/tcp.h>  // has more of tcp_info than netinet/tcp.h
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

namespace hbm {

Descriptor listen_on_all_addresses(uint16_t& port) {
  Descriptor made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(any);
  if (!made || bind(made.get(), reinterpret_cast<sockaddr*>(&any), length) != 0 ||
      listen(made.get(), SOMAXCONN) != 0 ||
      getsockname(made.get(), reinterpret_cast<sockaddr*>(&any), &length) != 0) {
    return {};
  }
  port = ntohs(any.sin_port);
  return made;
}

std::string machine_addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) return {};
  std::string text;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    if (each->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> address{};
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(each->ifa_addr)->sin_addr, address.data(),
              address.size());
    text += std::string(" ") + address.data();
  }
  freeifaddrs(found);
  return text;
}

Descriptor start_to_connect(const std::string& address, uint16_t port) {
  Descriptor made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  inet_pton(AF_INET, address.c_str(), &to.sin_addr);
  if (!made || (connect(made.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0 &&
                errno != EINPROGRESS)) {
    return {};
  }
  return made;
}

int connection_error(int socket) {
  int failure = 0;
  socklen_t length = sizeof failure;
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &failure, &length) != 0) return errno;
  return failure;
}

std::chrono::microseconds least_round_trip(int socket) {
  constexpr uint32_t kNotMeasured = UINT32_MAX;  // the kernel's value
  tcp_info info{};
  info.tcpi_min_rtt = kNotMeasured;
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return std::chrono::microseconds(info.tcpi_min_rtt == kNotMeasured ? 0 : info.tcpi_min_rtt);
}

}  // namespace hbm
