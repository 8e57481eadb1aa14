// How a client is let in: the box's challenge, the client's proof of the token, and the box's own.
//
// Threads: one at a time.
#pragma once

#include <memory>
#include <string>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"

namespace hbm::box {

// What every client of a door is told, and what it must know.
struct ListenerIdentity {
  std::string token;  // empty: none is asked for
  std::string boot_id;
  std::string socket_path;
  uint16_t verbs_port = 0;
};

class Handshake {
 public:
  // With a fresh nonce. REQUIRES: both outlive it.
  Handshake(RequestHandler& handler, const ListenerIdentity& welcome);

  const smb::Hello& hello() const noexcept { return hello_; }

  struct Outcome {
    std::shared_ptr<Session> session;  // none: refused, see status and cause
    smb::Status status = smb::Status::kOk;
    std::string cause;
    smb::Joined joined{};
  };
  Outcome join(const smb::Join& join, smb::TransportKind transport);

 private:
  RequestHandler& handler_;
  const ListenerIdentity& welcome_;
  smb::Hello hello_{};
};

// Throws Error(kInvalid) when one of its texts does not fit into a Joined.
void require_sendable(const ListenerIdentity& welcome);

}  // namespace hbm::box
