#include "base/tcp.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/tcp.h>  // has more of tcp_info than netinet/tcp.h
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace hbm {
namespace {

constexpr const char* kPorts = "HBMCOMM_PORTS";
constexpr const char* kInterfaces = "HBMCOMM_INTERFACES";

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  for (size_t end = text.find(separator); end != std::string_view::npos;
       end = text.find(separator, begin)) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

// An address of IPv4 or IPv6.
union Name {
  sockaddr_storage storage;
  sockaddr any;
  sockaddr_in ipv4;
  sockaddr_in6 ipv6;

  in_port_t& port() { return any.sa_family == AF_INET6 ? ipv6.sin6_port : ipv4.sin_port; }
};

// Returns 0 if the text is no port.
uint16_t parse_port(std::string_view text) {
  uint16_t port = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), port);
  return failure == std::errc() && end == text.data() + text.size() ? port : uint16_t{0};
}

// Returns the address as text; empty if it is none of IPv4 and IPv6, or if other machines cannot
// use it.
std::string text_of(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address->sa_family == AF_INET) {
    const auto& name = *reinterpret_cast<const sockaddr_in*>(address);
    inet_ntop(AF_INET, &name.sin_addr, text.data(), text.size());
  } else if (address->sa_family == AF_INET6) {
    const in6_addr& name = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&name) || IN6_IS_ADDR_LOOPBACK(&name)) return {};
    inet_ntop(AF_INET6, &name, text.data(), text.size());
  }
  return text.data();
}

struct InterfaceAddress {
  std::string interface;
  std::string address;
};

// Returns the addresses of all interfaces that are up, first of IPv4, then of IPv6. Returns none if
// the kernel refuses the list.
std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) return {};
  std::vector<InterfaceAddress> ipv4, ipv6;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    const std::string text = text_of(each->ifa_addr);
    if (text.empty()) continue;
    (each->ifa_addr->sa_family == AF_INET ? ipv4 : ipv6).push_back({each->ifa_name, text});
  }
  freeifaddrs(found);
  ipv4.insert(ipv4.end(), ipv6.begin(), ipv6.end());
  return ipv4;
}

std::vector<std::string> choose_interfaces() {
  const char* const text = std::getenv(kInterfaces);
  std::vector<std::string> chosen = parse_interfaces(text);
  const std::vector<InterfaceAddress> present = interface_addresses();
  if (present.empty()) return chosen;
  for (const std::string& name : chosen) {
    if (std::ranges::find(present, name, &InterfaceAddress::interface) != present.end()) continue;
    std::string error = std::string(kInterfaces) + "=" + text + " names " + name +
                        ", and this machine has no interface of this name with an address; it has";
    for (const auto& [interface, address] : present)
      error += " " + interface + " (" + address + ")";
    throw Error(ErrorKind::kInvalid, error);
  }
  return chosen;
}

// Returns true for errno's value if another port may be free, or permitted.
bool is_taken(int error) { return error == EADDRINUSE || error == EACCES; }

Descriptor listen_at_port(Name name, unsigned length, uint16_t port, bool takes_ipv4) {
  name.port() = htons(port);
  Descriptor made(socket(name.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) return {};
  // The next process can take the port if this one has ended, and connections of it linger. Both
  // processes must have set this option.
  const int reuse = 1;
  setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  const int only = takes_ipv4 ? 0 : 1;
  if (name.any.sa_family == AF_INET6) {
    setsockopt(made.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  }
  if (bind(made.get(), &name.any, length) == 0 && listen(made.get(), SOMAXCONN) == 0) return made;
  const int failure = errno;
  made = Descriptor();
  errno = failure;
  return {};
}

}  // namespace

PortRange parse_ports(const char* text) {
  if (text == nullptr || *text == '\0') return {};
  const std::vector<std::string_view> ends = split(text, '-');
  const PortRange range{parse_port(ends.front()), parse_port(ends.back())};
  if (ends.size() != 2 || range.first == 0 || range.last < range.first) {
    throw Error(ErrorKind::kInvalid,
                std::string(kPorts) + "=" + text + " is not a range of ports such as 41000-41100");
  }
  return range;
}

std::vector<std::string> parse_interfaces(const char* text) {
  if (text == nullptr || *text == '\0') return {};
  std::vector<std::string> names;
  for (const std::string_view name : split(text, ',')) names.emplace_back(name);
  if (std::ranges::find(names, "") != names.end()) {
    throw Error(ErrorKind::kInvalid, std::string(kInterfaces) + "=" + text +
                                         " is not a list of interfaces such as eth0,eth1");
  }
  return names;
}

const PortRange& chosen_ports() {
  static const PortRange range = parse_ports(std::getenv(kPorts));
  return range;
}

const std::vector<std::string>& chosen_interfaces() {
  // Is never destroyed, because threads may use it until the process ends.
  static const auto& names = *new std::vector<std::string>(choose_interfaces());
  return names;
}

Descriptor listen_tcp_at(const sockaddr* name, unsigned length, bool takes_ipv4) {
  Name where{};
  std::memcpy(&where, name, length);
  const uint16_t port = ntohs(where.port());
  if (port != 0 || chosen_ports().first == 0) {
    return listen_at_port(where, length, port, takes_ipv4);
  }
  const auto [first, last] = chosen_ports();
  for (uint32_t next = first; next <= last; ++next) {
    Descriptor made = listen_at_port(where, length, static_cast<uint16_t>(next), takes_ipv4);
    if (made || !is_taken(errno)) return made;
  }
  return {};
}

Descriptor listen_on_all_addresses(uint16_t& port) {
  Name any{};
  any.ipv6.sin6_family = AF_INET6;  // in6addr_any is zero
  Descriptor made = listen_tcp_at(&any.any, sizeof any.ipv6, true);
  if (!made && errno != EADDRINUSE) {  // this machine may have no IPv6
    any = {};
    any.ipv4.sin_family = AF_INET;
    made = listen_tcp_at(&any.any, sizeof any.ipv4, true);
  }
  if (!made) return {};
  Name bound{};
  socklen_t length = sizeof bound;
  getsockname(made.get(), &bound.any, &length);
  port = ntohs(bound.port());
  return made;
}

std::string listening_error(int error) {
  std::string text = std::strerror(error);
  const auto [first, last] = chosen_ports();
  if (first != 0 && is_taken(error)) {
    text += std::string(" (at every port of ") + kPorts + "=" + std::to_string(first) + "-" +
            std::to_string(last) + "; name more)";
  }
  return text;
}

std::vector<std::string> machine_addresses() {
  const std::vector<std::string>& chosen = chosen_interfaces();
  std::vector<std::string> found;
  for (const auto& [interface, address] : interface_addresses()) {
    if (chosen.empty() || address.starts_with("127.") ||
        std::ranges::find(chosen, interface) != chosen.end()) {
      found.push_back(address);
    }
  }
  return found;
}

std::string with_port(const std::string& address, uint16_t port) {
  const bool ipv6 = address.find(':') != std::string::npos;
  return (ipv6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

Descriptor start_to_connect(const std::string& address, uint16_t port) {
  const bool ipv6 = address.find(':') != std::string::npos;
  Name to{};
  to.any.sa_family = ipv6 ? AF_INET6 : AF_INET;
  to.port() = htons(port);
  void* const bytes = ipv6 ? static_cast<void*>(&to.ipv6.sin6_addr) : &to.ipv4.sin_addr;
  inet_pton(to.any.sa_family, address.c_str(), bytes);
  const socklen_t length = ipv6 ? sizeof to.ipv6 : sizeof to.ipv4;
  Descriptor made(socket(to.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made || (connect(made.get(), &to.any, length) != 0 && errno != EINPROGRESS)) return {};
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
