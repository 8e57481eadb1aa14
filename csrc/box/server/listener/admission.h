// Admits clients at a stream listener: the proofs of the token, the connections that have not
// joined yet, and the warnings about those that are refused.
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

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"
#include "box/server/request_handler.h"

namespace hbm::box {

// Facts about the box that a listener tells every client, and the token that a client must prove.
struct ListenerIdentity {
  std::string token;  // empty: none is asked for
  std::string boot_id;
  std::string socket_path;
  uint16_t verbs_port = 0;
  bool seal = true;  // with a token: what tcp carries after the join, see box/protocol/seal.h
};

// How a client is let in: the box's challenge, the client's proof of the token, and the box's own.
//
// Threads: one at a time.
class Handshake {
 public:
  // Makes a fresh nonce. REQUIRES: both outlive it.
  Handshake(RequestHandler& handler, const ListenerIdentity& identity,
            smb::TransportKind transport);

  const smb::Hello& hello() const noexcept { return hello_; }

  struct Admission {
    std::shared_ptr<Session> session;  // none: refused, see status and cause
    smb::Status status = smb::Status::kOk;
    std::string cause;
    smb::Joined joined{};
    std::optional<smb::SealKeys> seal;  // of what follows `joined`
  };
  Admission join(const smb::Join& join);

 private:
  RequestHandler& handler_;
  const ListenerIdentity& identity_;
  const smb::TransportKind transport_;
  smb::Hello hello_{};
};

// Throws Error(kInvalid) when one of its texts does not fit into a Joined.
void require_sendable(const ListenerIdentity& identity);

// The clients that are connected and have not joined yet: so many, for so long.
//
// Threads: every member may be called from any thread. A connection is dismissed with no lock held.
class PendingConnections {
 public:
  class JoiningConnection {
   public:
    virtual ~JoiningConnection() = default;

    // Must go. Called at most once, by any thread.
    virtual void dismiss(const char* cause) noexcept = 0;
  };

  PendingConnections(size_t most, std::chrono::milliseconds longest)
      : most_(most), longest_(longest) {}

  // When there are too many, the one that has been here longest is dismissed.
  void enter(const std::shared_ptr<JoiningConnection>& connection);

  // It has joined or is gone. It may have been dismissed before.
  void leave(const JoiningConnection& connection);

  // Makes room, when there is none for descriptors. False: nobody is here.
  bool dismiss_oldest(const char* cause);

  // Dismisses those who have been here too long. Returns the milliseconds until the next will have
  // been; negative: nobody is here.
  int sweep();

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {
    const JoiningConnection* key;
    std::weak_ptr<JoiningConnection> connection;
    Clock::time_point until;
  };

  std::shared_ptr<JoiningConnection> take_oldest();  // with the lock

  const size_t most_;
  const std::chrono::milliseconds longest_;
  std::mutex mutex_;            // guards all below
  std::list<Waiting> waiting_;  // the oldest first
  std::unordered_map<const JoiningConnection*, std::list<Waiting>::iterator> places_;
};

// Warnings that clients can cause, so that no client can fill the log: a few in a while, and then
// how many more there were.
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
  Clock::time_point until_{};  // of the interval that is under way
  uint64_t written_ = 0;
  uint64_t withheld_ = 0;
};

}  // namespace hbm::box
