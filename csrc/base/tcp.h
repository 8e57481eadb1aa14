// The steps of making a TCP connection over IPv4, and its round-trip time. No function waits.
//
// Threads: every function may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/descriptor.h"

namespace hbm {

// Listens on all IPv4 addresses, on a port that the kernel chooses, and sets `port`. Returns no
// descriptor if the kernel refuses; errno then says why.
Descriptor listen_on_all_addresses(uint16_t& port);

// Returns the IPv4 addresses of this machine's interfaces that are up, with a space before each.
std::string machine_addresses();

// Starts to connect. Returns no descriptor if the kernel refuses immediately; errno then says why.
Descriptor start_to_connect(const std::string& address, uint16_t port);

// Returns errno's value for the end of the attempt: 0 if the socket is connected. REQUIRES: the
// socket of start_to_connect() has become writable.
int connection_error(int socket);

// Returns the least round-trip time that the kernel has measured on a connection in the last
// minutes. Returns 0 if it has measured none, or if `socket` is no TCP socket.
std::chrono::microseconds least_round_trip(int socket);

}  // namespace hbm
