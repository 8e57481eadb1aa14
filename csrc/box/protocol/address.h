// Parses and prints the addresses of boxes.
//
//   smb://host:port           TCP; an IPv6 number is in brackets, smb://[::1]:7000
//   smb://a:7000,b:7000       several boxes, in this order
//   smb+unix:///path          a Unix socket, on the same machine only
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hbm::box::protocol {

struct Address {
  std::string host;  // empty: all interfaces, for listening
  uint16_t port = 0;
  std::string path;  // of a Unix socket; host and port are unused then

  bool is_unix() const noexcept { return !path.empty(); }
  std::string host_and_port() const;  // host:port, [host]:port
  std::string url() const;

  friend bool operator==(const Address&, const Address&) = default;
};

// Each function throws Error(kInvalid), naming the fault in `text`.
std::vector<Address> parse_url(std::string_view text);  // never returns an empty list or port 0
Address parse_host_and_port(std::string_view text);     // for listening: "host:0", ":0", "[::]:0"

}  // namespace hbm::box::protocol
