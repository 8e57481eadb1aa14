// The steps of making a TCP connection over IPv4 or IPv6, and its round-trip time. No function
// waits.
//
// Threads: every function may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/descriptor.h"

struct sockaddr;

namespace hbm {

struct PortRange {
  uint16_t first = 0;  // 0: the kernel chooses a port
  uint16_t last = 0;
};

// Parse "41000-41100" and "eth0,eth1"; null or empty: no choice. Throw Error(kInvalid) if the text
// is malformed.
PortRange parse_ports(const char* text);
std::vector<std::string> parse_interfaces(const char* text);

// Returns the range in HBMCOMM_PORTS, of the ports at which this process listens where its program
// names none. Reads the environment once in a process. Throws Error(kInvalid) if the value is
// malformed.
const PortRange& chosen_ports();

// Returns the names in HBMCOMM_INTERFACES, of the interfaces at whose addresses other machines may
// reach this process; empty: all. Reads the environment once in a process. Throws Error(kInvalid)
// if the value is malformed, or if an interface has no address.
const std::vector<std::string>& chosen_interfaces();

// The functions below that listen call chosen_ports(). If the kernel refuses, they return no
// descriptor, and errno says why.

// Makes a socket that listens at `name`, a sockaddr_in or sockaddr_in6 of `length` bytes. For port
// 0 it takes a free one of chosen_ports(). `takes_ipv4`: a socket of IPv6 serves IPv4 too.
Descriptor listen_tcp_at(const sockaddr* name, unsigned length, bool takes_ipv4);

// Listens on all addresses of IPv4, and of IPv6 if this machine has it, at one of chosen_ports().
// Sets `port`.
Descriptor listen_on_all_addresses(uint16_t& port);

// Returns errno's text. If no port of chosen_ports() could be taken, names the range.
std::string listening_error(int error);

// Returns the addresses of the interfaces that are up: of those in chosen_interfaces(), and
// 127.0.0.1 and its like. IPv4 addresses come first. Link-local and loopback addresses of IPv6 are
// left out.
std::vector<std::string> machine_addresses();

// Returns "10.0.0.1:80" or "[fd00::1]:80".
std::string with_port(const std::string& address, uint16_t port);

// Starts to connect to an address of machine_addresses(). Returns no descriptor if the kernel
// refuses immediately; errno then says why.
Descriptor start_to_connect(const std::string& address, uint16_t port);

// Returns errno's value for the end of the attempt: 0 if the socket is connected. REQUIRES: the
// socket of start_to_connect() has become writable.
int connection_error(int socket);

// Returns the least round-trip time that the kernel has measured on a connection in the last
// minutes. Returns 0 if it has measured none, or if `socket` is no TCP socket.
std::chrono::microseconds least_round_trip(int socket);

}  // namespace hbm
