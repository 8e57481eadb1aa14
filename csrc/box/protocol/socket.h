// Stream sockets, TCP and Unix, for both ends of a connection.
//
// All sockets made here are non-blocking and closed on exec. TCP sockets send immediately
// (TCP_NODELAY), and detect a vanished peer after about 30 s: by keepalive, and by TCP_USER_TIMEOUT
// for unacknowledged data.
//
// Threads: any.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/descriptor.h"
#include "box/protocol/address.h"

namespace hbm::box::protocol {

using Deadline = std::chrono::steady_clock::time_point;

// Listens at `address`. Port 0: one of chosen_ports(), see local_port(). Empty host: IPv6 and IPv4
// on all interfaces. Replaces a Unix socket's file if no process listens at it. The new file has
// `file_mode`; the caller must remove it at the end. Throws Error(kUnavailable) with the cause.
Descriptor listen_at(const Address& address, mode_t file_mode = 0600);

uint16_t local_port(int socket);

// Accepts a pending client, and sets `failure` to 0. On failure returns none, and sets `failure` to
// the errno; EAGAIN: no client is pending.
Descriptor accept_from(int listener, int& failure) noexcept;

// Connects to the first reachable address of the host. Throws Error(kNetwork) with the cause, also
// when `deadline` passes.
Descriptor connect_to(const Address& address, Deadline deadline);

// Sleeps until poll() reports one of `events` or an error. Returns false if `deadline` passes
// first. Throws Error(kNetwork) when poll() fails.
bool wait_for(int socket, short events, Deadline deadline);

// Returns the user of the peer of a Unix socket; none for other sockets.
std::optional<uid_t> peer_user(int socket) noexcept;

// Returns the peer as text for errors and the log, such as "192.0.2.1:5000", "[::1]:5000" or
// "process 77 of user 0".
std::string peer_name(int socket);

// Returns the peer's address without its port, such as "192.0.2.1" or "::1"; "local" for the peer
// of a Unix socket. Returns an empty text if the peer has gone.
std::string peer_host(int socket);

}  // namespace hbm::box::protocol
