// The interface of a client's transports: one live connection to a box, by shm, tcp or verbs.
// docs/design/memory-box.md lists the steps to add a transport.
//
// A transport moves requests. It does not handle reconnects or sequence numbers. When it breaks it
// throws Broken, and must not be used again: the client opens another one, and posts the unfinished
// requests again.
//
// A transport belongs to the process that opened it. In a forked child it must neither be used nor
// destroyed. The progress engine, its only user, ensures this (box/client/progress_engine.h).
//
// Threads: one at a time (the client's progress thread); any may call wake() and alive(). A
// transport may have threads of its own, which do not access the memory of a TransportRequest after
// ~Transport.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "box/protocol/protocol.h"

namespace hbm::box::transport {

// The connection is lost; the message has the reason.
class Broken : public Error {
 public:
  explicit Broken(const std::string& message) : Error(ErrorKind::kNetwork, message) {}
};

// A client's access to an attached segment over this transport. The transport makes it from the
// reply to kAlloc or kAttach.
struct Grant {
  uint32_t handle = 0;
  uint64_t size = 0;
  // shm: the mapped segment, readable, and writable unless attached for reading only. The caller
  // copies from and to it, and posts no reads and writes. Null on other transports.
  std::byte* memory = nullptr;
  std::shared_ptr<void> holds;  // the mapping
};

// One request. The client owns it, and keeps it and its memory alive until finished() returns true,
// or the transport is destroyed.
struct TransportRequest {
  protocol::Opcode opcode{};
  std::vector<std::byte> body;  // of control requests: all except kRead and kWrite

  // kRead and kWrite, of any size; the transport cuts them into slices.
  const Grant* grant = nullptr;
  uint64_t offset = 0;
  std::byte* local = nullptr;  // destination of a read, source of a write
  uint64_t bytes = 0;

  // Set by the transport before finished(). If several slices of a transfer fail, the status and
  // cause of the first failure are kept.
  protocol::Status status = protocol::Status::kOk;
  std::string cause;
  std::vector<std::byte> reply;    // body
  std::vector<std::byte> payload;  // kStats
  std::shared_ptr<Grant> granted;  // kAlloc, kAttach

  // Stored with release order by the finishing thread, loaded with acquire order by finished().
  std::atomic<bool> done{false};
  bool finished() const noexcept { return done.load(std::memory_order_acquire); }
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual protocol::TransportKind kind() const noexcept = 0;

  // Starts a request. Control requests reach the box in the order of posting; transfers are
  // unordered. Short requests that are posted while the transport is busy are sent together.
  virtual void post(TransportRequest& request) = 0;

  // Sends and receives until a TransportRequest finishes or `most` has passed. Returns immediately
  // if nothing is in flight. Does not sleep if `most` is 0.
  virtual void progress(std::chrono::nanoseconds most) = 0;

  // Ends the sleep of progress().
  virtual void wake() noexcept = 0;

  // Returns false once the box is known to be gone, also with nothing in flight. Takes no system
  // call. A copy from Grant::memory is valid only if alive() returns true before and after the
  // copy.
  virtual bool alive() const noexcept = 0;

  // Returns a descriptor that an idle client polls for POLLRDHUP. poll() reports an event when the
  // box closes the connection. If the result is negative, the client checks alive() periodically
  // instead.
  virtual int liveness_fd() const noexcept = 0;

  // Registers memory, so that transfers from and to it take no extra copy, until the returned
  // handle is destroyed. The memory must stay mapped until then. Returns null if this transport has
  // no use for registered memory.
  virtual std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes) {
    static_cast<void>(memory);
    static_cast<void>(bytes);
    return nullptr;
  }
};

struct TransportOptions {
  std::string host;  // tcp and verbs
  uint16_t port = 0;
  std::string path;          // shm: of the box's Unix socket
  std::string token;         // empty: none
  bool seal = true;          // with a token: authenticate; must agree with the box's option
  protocol::Join join{};     // session and flags; the transport sets the rest
  uint32_t connections = 4;  // connections of tcp, queue pairs of verbs
  std::chrono::milliseconds timeout{5000};  // for connecting and joining
};

struct OpenedTransport {
  std::unique_ptr<Transport> transport;
  protocol::Joined joined{};
};

// Throw Error(kNetwork) with the cause if the box cannot be reached or does not prove the token.
// Throw Refused if the box refuses the join. open_tcp() throws Error(kInvalid) for an invalid
// number of connections. open_shm() throws Error(kUnavailable) if another user serves the socket.
OpenedTransport open_tcp(const TransportOptions& opening);
OpenedTransport open_shm(const TransportOptions& opening);

// Returns the reason if shm cannot be used with a box that was reached over another transport, as
// text for "not shm: ...". Returns an empty string if this process and the box run on one kernel,
// and the box's Unix socket answers at Joined::socket_path, the path for open_shm(). Even then the
// first kAlloc or kAttach may fail to map the segment.
//
// Threads: any. Does not block.
std::string why_no_shm(const protocol::Joined& joined);

// Thrown if the box refuses a Join, or if its Hello shows that it would refuse the Join.
class Refused : public Error {
 public:
  Refused(protocol::Status status, const std::string& cause)
      : Error(ErrorKind::kNetwork, cause), status_(status) {}
  protocol::Status status() const noexcept { return status_; }

 private:
  protocol::Status status_;
};

}  // namespace hbm::box::transport
