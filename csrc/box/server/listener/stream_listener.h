// Lets clients in over TCP and a Unix socket.
//
// A few event loops, each a thread over epoll, share the connections: one stays with its loop, so
// the lanes of a client are served side by side. Reads and writes are served by the loop, between
// the socket and the segment's memory; all else goes to the handler, and the thread that answers
// sends the reply. No connection is served for more than a quantum of bytes before the
// others have had their turn, and none is read whose replies are not taken.
//
// A client proves the token before anything else; until then it may send one Join, in time, and
// there is room for so many such clients that the oldest goes when one more comes. A Unix socket
// lets in this process's user and root, unless the options name others. A malformed frame costs its
// sender the connection, and nobody else anything. The connections of a session that has ended are
// closed within seconds.
//
// Threads: as Listener says.
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

namespace hbm::box {

struct StreamListenerOptions {
  std::vector<smb::Address> listen;  // TCP; port 0: any
  std::string socket_path;           // of the Unix socket; empty: none
  std::string token;                 // empty: none is asked for
  bool seal = true;                  // with a token: what tcp carries, see box/protocol/seal.h
  std::string boot_id;               // Joined::boot_id
  uint16_t verbs_port = 0;           // Joined::verbs_port
  uint32_t threads = 4;              // each runs an event loop
  std::chrono::milliseconds join_within = kJoinTimeout;
  size_t most_joining = kMostJoining;  // connections that have not joined yet
  std::vector<uid_t> users;  // may come in by the Unix socket besides root; empty: our own
  uint64_t quantum = kTurnBytes;
};

class StreamListener final : public Listener {
 public:
  // Raises the limit on open files (RLIMIT_NOFILE) as far as it goes.
  // Throws Error(kUnavailable) when an address cannot be listened on, Error(kInvalid) for options
  // that make no listener. REQUIRES: `handler` outlives it.
  StreamListener(RequestHandler& handler, const StreamListenerOptions& options);
  ~StreamListener() override;

  // The addresses that it listens on, with their ports, in the order of the options.
  const std::vector<smb::Address>& addresses() const noexcept;

  void drain(uint32_t most_ms) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hbm::box
