// The interface between the service of a box and the listeners through which its clients come in:
// what is done with a request, whatever transport carried it.
//
// Threads: every member may be called from any thread; none blocks for longer than a lock is held.
// An Answer is called exactly once, by any thread, perhaps before submit() returns, and must not
// block.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "box/protocol/protocol.h"

namespace hbm::box {

class BoxSegment;  // box/server/storage/segment.h
class Session;     // the service's own; listeners only hold it

struct Reply {
  smb::Status status = smb::Status::kOk;
  std::vector<std::byte> body;     // of the protocol's struct
  std::vector<std::byte> payload;  // kStats
  std::string cause;               // when status is not kOk
  // kAlloc and kAttach: what was attached, for the listener to add its transport's part.
  std::shared_ptr<BoxSegment> granted;
  bool may_write = false;
};
using Answer = std::function<void(Reply)>;

template <smb::Body T>
Reply with_body(const T& value) {
  Reply reply;
  reply.body.resize(sizeof value);
  std::memcpy(reply.body.data(), &value, sizeof value);
  return reply;
}

inline Reply refused(smb::Status status, std::string cause) {
  Reply reply;
  reply.status = status;
  reply.cause = std::move(cause);
  return reply;
}

// A request that the box does not carry out: what the client is told.
class Refusal : public std::runtime_error {
 public:
  Refusal(smb::Status status, const std::string& cause)
      : std::runtime_error(cause), status_(status) {}
  smb::Status status() const noexcept { return status_; }

 private:
  smb::Status status_;
};

// Part of a segment that a listener may copy from or to, as long as it holds `segment`.
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
  // that are there: the verbs listener registers their memory. It may throw Error: the request
  // fails. REQUIRES: no client has come in yet.
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
