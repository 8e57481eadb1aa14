#include "box/protocol/address.h"

#include <sys/un.h>

#include <charconv>

#include "base/error.h"

namespace hbm::box::protocol {
namespace {

constexpr std::string_view kTcp = "smb://";
constexpr std::string_view kUnix = "smb+unix://";
constexpr size_t kLongestPath = sizeof(sockaddr_un::sun_path) - 1;

[[noreturn]] void refuse(std::string_view text, const std::string& cause) {
  throw Error(ErrorKind::kInvalid,
              "\"" + std::string(text) + "\" is no address of a box: " + cause);
}

uint16_t parse_port(std::string_view text, std::string_view digits) {
  uint16_t port = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stopped, failure] = std::from_chars(digits.data(), end, port);
  if (failure != std::errc() || stopped != end) {
    refuse(text, "its port is \"" + std::string(digits) + "\", not a number from 0 to 65535");
  }
  return port;
}

Address parse_unix(std::string_view text) {
  Address address;
  address.path = text.substr(kUnix.size());
  if (address.path.empty() || address.path.front() != '/') {
    refuse(text, "smb+unix:// is followed by an absolute path, as in smb+unix:///run/box");
  }
  if (address.path.size() > kLongestPath) {
    refuse(text, "its path has " + std::to_string(address.path.size()) +
                     " bytes, a socket's at most " + std::to_string(kLongestPath));
  }
  if (address.path.find('\0') != std::string::npos) refuse(text, "its path has a zero byte");
  return address;
}

}  // namespace

std::string Address::host_and_port() const {
  const bool bracketed = host.find(':') != std::string::npos;
  return (bracketed ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string Address::url() const {
  return is_unix() ? std::string(kUnix) + path : std::string(kTcp) + host_and_port();
}

Address parse_host_and_port(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || text.ends_with(']')) {
    refuse(text, "a port is missing, as in host:7000");
  }
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']') && host.size() > 2) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":[]") != std::string_view::npos) {
    refuse(text, "an IPv6 number stands in brackets, as in [::1]:7000");
  }
  if (host.find_first_of(std::string_view("/@,? \t\n\0", 8)) != std::string_view::npos) {
    refuse(text, "\"" + std::string(host) + "\" is no host");
  }
  Address address;
  address.host = host;
  address.port = parse_port(text, text.substr(colon + 1));
  return address;
}

std::vector<Address> parse_url(std::string_view text) {
  if (text.starts_with(kUnix)) return {parse_unix(text)};
  if (!text.starts_with(kTcp)) refuse(text, "it starts neither with smb:// nor with smb+unix://");
  std::vector<Address> boxes;
  for (size_t begin = kTcp.size();;) {
    const size_t comma = text.find(',', begin);
    const Address box = parse_host_and_port(text.substr(begin, comma - begin));
    if (box.host.empty()) refuse(text, "a host is missing, as in smb://host:7000");
    if (box.port == 0) refuse(text, "port 0 is none that a box listens on");
    boxes.push_back(box);
    if (comma == std::string_view::npos) return boxes;
    begin = comma + 1;
  }
}

}  // namespace hbm::box::protocol
