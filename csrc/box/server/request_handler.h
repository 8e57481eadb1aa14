// What a box does with requests, whatever transport carried them: the seam between the service and
// the doors through which clients come in.
//
// Threads: every member may be called from any thread; none blocks for longer than a lock is held.
// An Answer is called exactly once, by any thread, perhaps before submit() returns, and must not
// block.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::box {

class BoxSegment;  // box/server/storage/segment.h
class Session;     // the service's own; doors only hold it

struct Reply {
  smb::Status status = smb::Status::kOk;
  std::vector<std::byte> body;     // of the protocol's struct
  std::vector<std::byte> payload;  // kStats
  std::string cause;               // when status is not kOk
  // kAlloc and kAttach: what was attached, for the door to add its transport's part.
  std::shared_ptr<BoxSegment> granted;
  bool may_write = false;
};
using Answer = std::function<void(Reply)>;

// Part of a segment that a door may copy from or to, as long as it holds `segment`.
struct Access {
  smb::Status status = smb::Status::kOk;
  std::string cause;
  std::shared_ptr<BoxSegment> segment;
  std::byte* at = nullptr;
};

struct Joining {
  std::shared_ptr<Session> session;  // none: refused, see status and cause
  smb::Status status = smb::Status::kOk;
  std::string cause;
  smb::Id id;
  uint64_t applied = 0;
  bool resumed = false;
};

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;

  virtual smb::Id contents() const = 0;  // Joined::box
  virtual uint32_t lease_ms() const = 0;

  // A client that has proved the token comes in by a connection: a new session, or the one that
  // `join` names. Each connection counts one until left().
  virtual Joining join(const smb::Join& join, smb::TransportKind transport) = 0;

  // The connection is closed. The session stays until its lease ends.
  virtual void left(const std::shared_ptr<Session>& session) = 0;

  // Every request but kJoin, kRead and kWrite. `body` has the opcode's size, and is copied.
  virtual void submit(const std::shared_ptr<Session>& session, smb::Opcode opcode,
                      std::span<const std::byte> body, Answer answer) = 0;

  // kRead, kWrite: checks the session's right, counts the operation, and renews the lease.
  virtual Access access(const std::shared_ptr<Session>& session, const smb::Transfer& transfer,
                        bool writing) = 0;

  // Sets what is done with every new segment before anyone can attach to it, and, now, with those
  // that are there: the verbs door registers their memory. It may throw Error: the request fails.
  // REQUIRES: no client has come in yet.
  virtual void on_new_segment(std::function<void(BoxSegment&)> action) = 0;

  // The client has left, or its lease is over: nothing but refusals will come of its connections.
  virtual bool ended(const std::shared_ptr<Session>& /*session*/) const { return false; }
};

// A way in. Its threads end in the destructor, and no Answer is used after it.
class Listener {
 public:
  virtual ~Listener() = default;

  // Takes no further clients or requests, and returns when what was read is answered and sent, or
  // after `most_ms`.
  virtual void drain(uint32_t most_ms) = 0;
};

}  // namespace hbm::box
