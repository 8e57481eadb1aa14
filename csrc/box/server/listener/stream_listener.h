// Serves clients over TCP and a Unix socket.
//
// A few event loops, each a thread with epoll, share the connections. A connection stays with its
// loop, so the connections of one client are served in parallel. The loop serves reads and writes
// between the socket and the segment's memory. All other requests go to the handler, and the thread
// that executed a request sends the reply. In each turn of its loop, a connection is served for at
// most one quantum of bytes. It is not read while its client does not take replies.
//
// A client must prove the token first. Until then it may send only a Join, within a time limit. The
// number of such clients is bounded: a new one displaces the oldest. A Unix socket admits root, and
// the users in the options, by default the user of this process. A malformed frame closes its
// connection and affects no other. Connections of an ended session are closed within seconds.
//
// Threads: as Listener.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "box/protocol/address.h"
#include "box/server/request_handler.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {

struct StreamListenerOptions {
  std::vector<protocol::Address> listen;  // TCP; port 0: any
  std::string socket_path;                // of the Unix socket; empty: no Unix socket
  std::string token;                      // empty: no token is required
  bool seal = true;         // with a token: authenticate TCP (box/protocol/authenticator.h)
  std::string boot_id;      // Joined::boot_id
  uint16_t verbs_port = 0;  // Joined::verbs_port
  uint32_t threads = 4;     // event loops
  std::chrono::milliseconds join_within = kJoinTimeout;
  size_t most_joining = kMostJoining;  // connections that have not joined yet
  std::vector<uid_t>
      users;  // admitted at the Unix socket besides root; empty: the user of this process
  uint64_t quantum = kTurnBytes;
};

class StreamListener final : public Listener {
 public:
  // Raises the limit on open files (RLIMIT_NOFILE) as far as possible. Throws Error(kUnavailable)
  // if it cannot listen at an address, Error(kInvalid) for invalid options. REQUIRES: `handler`
  // outlives this object.
  StreamListener(RequestHandler& handler, const StreamListenerOptions& options);
  ~StreamListener() override;

  // Returns the TCP addresses with their ports, in the order of the options.
  const std::vector<protocol::Address>& addresses() const noexcept;

  void drain(uint32_t most_ms) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hbm::box::server::listener
