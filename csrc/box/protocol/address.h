// The address of a box, as users write it.
//
//   smb://host:port           TCP; a number of IPv6 stands in brackets, smb://[::1]:7000
//   smb://a:7000,b:7000       several boxes, in this order
//   smb+unix:///path          a Unix socket, on the same machine alone
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hbm::smb {

struct Address {
  std::string host;  // empty: every one of the machine, to listen on
  uint16_t port = 0;
  std::string path;  // of a Unix socket; then host and port mean nothing

  bool is_unix() const noexcept { return !path.empty(); }
  std::string host_and_port() const;  // host:port, [host]:port
  std::string url() const;

  friend bool operator==(const Address&, const Address&) = default;
};

// Both throw Error(kInvalid), which says what is wrong with `text`.
std::vector<Address> parse_url(std::string_view text);  // never empty; ports are not 0
Address parse_host_and_port(std::string_view text);     // to listen on: "host:0", ":0", "[::]:0"

}  // namespace hbm::smb
