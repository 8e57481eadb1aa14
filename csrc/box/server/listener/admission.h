// Admits clients at a stream listener: checks their proofs of the token, limits the connections
// that have not joined yet, and limits the warnings about refused clients.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"

namespace hbm::box::server::listener {

// The facts about a box that a listener sends to each client, and the token that a client must
// prove.
struct ListenerIdentity {
  std::string token;  // empty: no token is required
  std::string boot_id;
  std::string socket_path;
  uint16_t verbs_port = 0;
  bool seal = true;  // with a token: authenticate TCP after the join
};

// The handshake of one connection: the challenge of the box, the proof of the client, and the proof
// of the box.
//
// Threads: one at a time.
class Handshake {
 public:
  // Makes a fresh nonce. REQUIRES: both arguments outlive this object.
  Handshake(RequestHandler& handler, const ListenerIdentity& identity,
            protocol::TransportKind transport);

  const protocol::Hello& hello() const noexcept { return hello_; }

  struct Admission {
    std::shared_ptr<Session> session;  // null: the client is refused with `status` and `cause`
    protocol::Status status = protocol::Status::kOk;
    std::string cause;
    protocol::Joined joined{};
    std::optional<protocol::MacKeys> keys;  // for all frames after `joined`; none: unauthenticated
  };
  // `host`: as for RequestHandler::join().
  Admission join(const protocol::Join& join, const std::string& host);

 private:
  RequestHandler& handler_;
  const ListenerIdentity& identity_;
  const protocol::TransportKind transport_;
  protocol::Hello hello_{};
};

// Throws Error(kInvalid) if a text does not fit into a Joined.
void require_sendable(const ListenerIdentity& identity);

// Bounds how many clients may be connected without having joined (`most`), and for how long
// (`longest`).
//
// Threads: any. A connection is dismissed with no lock held.
class PendingConnections {
 public:
  class JoiningConnection {
   public:
    virtual ~JoiningConnection() = default;

    // Closes the connection, with `cause` for the log. Called at most once, by any thread.
    virtual void dismiss(const char* cause) noexcept = 0;
  };

  PendingConnections(size_t most, std::chrono::milliseconds longest)
      : most_(most), longest_(longest) {}

  // Adds a connection; dismisses the oldest one if there are too many.
  void enter(const std::shared_ptr<JoiningConnection>& connection);

  // Removes a connection that has joined or closed. It may have been dismissed before.
  void leave(const JoiningConnection& connection);

  // Dismisses the oldest connection. Called when descriptors have run out. Returns false if there
  // is none.
  bool dismiss_oldest(const char* cause);

  // Dismisses connections whose time is over. Returns the milliseconds until the next one is due;
  // negative: there is none.
  int sweep();

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {
    const JoiningConnection* key;
    std::weak_ptr<JoiningConnection> connection;
    Clock::time_point until;
  };

  std::shared_ptr<JoiningConnection> take_oldest();  // REQUIRES: the lock is held

  const size_t most_;
  const std::chrono::milliseconds longest_;
  std::mutex mutex_;            // guards all below
  std::list<Waiting> waiting_;  // the oldest first
  std::unordered_map<const JoiningConnection*, std::list<Waiting>::iterator> entries_;
};

// Rate-limits warnings that clients can cause, so that no client can fill the log. Logs at most
// `most` warnings per interval. The first warning of a later interval states how many were
// withheld.
//
// Threads: warn() may be called from any thread.
class LogLimiter {
 public:
  LogLimiter(uint64_t most, std::chrono::seconds interval) : most_(most), interval_(interval) {}

  void warn(const std::string& message);

 private:
  using Clock = std::chrono::steady_clock;

  const uint64_t most_;
  const std::chrono::seconds interval_;
  std::mutex mutex_;           // guards all below
  Clock::time_point until_{};  // end of the current interval
  uint64_t written_ = 0;
  uint64_t withheld_ = 0;
};

}  // namespace hbm::box::server::listener
