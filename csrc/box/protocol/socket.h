// Stream sockets, TCP and Unix, for both ends of a connection.
//
// All sockets made here are non-blocking and closed on exec. Those of TCP send at once
// (TCP_NODELAY), and a peer that vanished is found out after about half a minute (keepalive, and
// TCP_USER_TIMEOUT for what was sent).
//
// Threads: every function may be called from any thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/descriptor.h"
#include "box/protocol/address.h"

namespace hbm::smb {

using Deadline = std::chrono::steady_clock::time_point;

// Listens at `address`. Port 0: the kernel chooses one, see local_port(). Host empty: IPv6 and IPv4
// on every interface. A socket file that nobody listens on any more is replaced; `file_mode` is the
// new one's, which whoever listens removes.
// Throws Error(kUnavailable) with the cause.
Descriptor listen_at(const Address& address, mode_t file_mode = 0600);

uint16_t local_port(int socket);

// A client that calls, or none: `failure` is then the errno (EAGAIN: nobody calls now).
Descriptor accept_from(int listener, int& failure) noexcept;

// Tries every address of a host name in turn.
// Throws Error(kNetwork) with the cause, also when `deadline` passes.
Descriptor connect_to(const Address& address, Deadline deadline);

// Sleeps until one of `events` (of poll) or an error is there; false: `deadline` has passed.
// Throws Error(kNetwork) when the kernel refuses.
bool wait_for(int socket, short events, Deadline deadline);

// The user at the other end of a Unix socket; nothing for other sockets.
std::optional<uid_t> peer_user(int socket) noexcept;

// "192.0.2.1:5000", "[::1]:5000" or "process 77 of user 0", for messages.
std::string peer_name(int socket);

}  // namespace hbm::smb
