// The interface between listeners and the service of a box: executes requests, independent of the
// transport that carried them.
//
// Threads: any. No member waits for the execution of a request. Under `sync`, join() waits for the
// disk. An Answer is called exactly once, by any thread, perhaps before submit() returns, and must
// not block.
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

namespace hbm::box::server {

namespace storage {
class BoxSegment;  // box/server/storage/segment.h
}  // namespace storage

class Session;  // private to the service; listeners only hold it

struct Reply {
  protocol::Status status = protocol::Status::kOk;
  std::vector<std::byte> body;     // a struct of the protocol
  std::vector<std::byte> payload;  // kStats
  std::string cause;               // if status is not kOk
  // kAlloc and kAttach: the attached segment. The listener adds the access to it that its transport
  // gives: a descriptor, or remote keys.
  std::shared_ptr<storage::BoxSegment> granted;
  bool may_write = false;
};
using Answer = std::function<void(Reply)>;

template <protocol::Body T>
Reply with_body(const T& value) {
  Reply reply;
  reply.body.resize(sizeof value);
  std::memcpy(reply.body.data(), &value, sizeof value);
  return reply;
}

inline Reply refused(protocol::Status status, std::string cause) {
  Reply reply;
  reply.status = status;
  reply.cause = std::move(cause);
  return reply;
}

// The refusal of a request: the status and cause for the client.
class Refusal : public std::runtime_error {
 public:
  Refusal(protocol::Status status, const std::string& cause)
      : std::runtime_error(cause), status_(status) {}
  protocol::Status status() const noexcept { return status_; }

 private:
  protocol::Status status_;
};

// A range of a segment for a listener to copy from or to while it holds `segment`.
struct Access {
  protocol::Status status = protocol::Status::kOk;
  std::string cause;
  std::shared_ptr<storage::BoxSegment> segment;
  std::byte* at = nullptr;
};

struct Joining {
  std::shared_ptr<Session> session;  // null: the client is refused with `status` and `cause`
  protocol::Status status = protocol::Status::kOk;
  std::string cause;
  protocol::Id id;
  uint64_t applied = 0;
  bool resumed = false;
};

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;

  virtual protocol::Id generation() const = 0;  // Joined::generation
  virtual uint32_t lease_ms() const = 0;

  // Admits a connection whose client has proved the token: begins a session, or joins the one that
  // `join` names. The session counts the connection until left(). `host`: where the client is, as
  // protocol::peer_host() returns it; empty: unknown.
  virtual Joining join(const protocol::Join& join, protocol::TransportKind transport,
                       const std::string& host) = 0;

  // Called when a connection of the session has closed. The session stays until its lease ends.
  virtual void left(const std::shared_ptr<Session>& session) = 0;

  // Queues a request of any opcode except kJoin, kRead and kWrite. `body` has the size for its
  // opcode, and is copied.
  virtual void submit(const std::shared_ptr<Session>& session, protocol::Opcode opcode,
                      std::span<const std::byte> body, Answer answer) = 0;

  // Admits a kRead or kWrite: checks the rights of the session, counts the operation, and renews
  // the lease.
  virtual Access access(const std::shared_ptr<Session>& session, const protocol::Transfer& transfer,
                        bool writing) = 0;

  // Sets the action that is called for each new segment before any client can attach to it, and
  // calls the action now for all present segments. The verbs listener registers memory this way. If
  // the action throws an Error, the request that creates the segment fails. REQUIRES: no client is
  // served.
  virtual void on_new_segment(std::function<void(storage::BoxSegment&)> action) = 0;

  // Returns true if the session has ended, because its client left or its lease expired. All
  // requests are refused from then on.
  virtual bool ended(const std::shared_ptr<Session>& /*session*/) const { return false; }
};

// A transport through which clients connect. The destructor ends its threads. An Answer that is
// called afterwards has no effect.
class Listener {
 public:
  virtual ~Listener() = default;

  // Accepts no further clients or requests. Returns when all requests that were read are answered
  // and the replies are sent, or after `most_ms`.
  virtual void drain(uint32_t most_ms) = 0;
};

}  // namespace hbm::box::server
