// The contract of a client's transports: one live connection to a box, by shm, tcp or verbs.
// docs/design/memory-box.md lists the steps to a new one.
//
// A transport moves requests; it knows nothing of reconnects, sequence numbers or what operations
// mean. When it breaks it throws Broken, and is of no further use: the client makes another and
// posts again whatever had not finished.
//
// It belongs to the process that opened it. In a forked child nothing may be done with it, not even
// destroyed: the client's driver, its only user, sees to that (box/client/driver.h).
//
// Threads: one at a time (the client's driver), but for wake() and alive(), which any may call. It
// may have threads of its own; none of them touches a TransportRequest's memory after ~Transport.
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

namespace hbm::transport {

// The connection is lost; the message says how.
class Broken : public Error {
 public:
  explicit Broken(const std::string& message) : Error(ErrorKind::kNetwork, message) {}
};

// A client's access to an attached segment on this transport, made from the reply to kAlloc or
// kAttach.
struct Grant {
  uint32_t handle = 0;
  uint64_t size = 0;
  // shm: the segment itself, readable, and writable if it was attached so; null elsewhere. Then
  // reads and writes are copies by the caller, and never posted.
  std::byte* memory = nullptr;
  std::shared_ptr<void> holds;  // the mapping
};

// One request. The client owns it, and keeps it and the memory that it names until finished().
struct TransportRequest {
  smb::Opcode opcode{};
  std::vector<std::byte> body;  // of control requests (all but kRead and kWrite)

  // kRead and kWrite, of any size; the transport cuts it in slices.
  const Grant* grant = nullptr;
  uint64_t offset = 0;
  std::byte* local = nullptr;  // to here, or from here
  uint64_t bytes = 0;

  // Set by the transport before finished. Of a transfer in slices: the first failure.
  smb::Status status = smb::Status::kOk;
  std::string cause;
  std::vector<std::byte> reply;    // body
  std::vector<std::byte> payload;  // kStats
  std::shared_ptr<Grant> granted;  // kAlloc, kAttach

  // Released by whoever finishes the request, acquired by finished().
  std::atomic<bool> done{false};
  bool finished() const noexcept { return done.load(std::memory_order_acquire); }
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual smb::TransportKind kind() const noexcept = 0;

  // Starts it. Control requests reach the box in the order in which they were posted; transfers are
  // in no order with anything. Small requests that are posted while the transport is busy go out
  // together.
  virtual void post(TransportRequest& request) = 0;

  // Sends and receives until a TransportRequest finishes or `most` has passed; returns at once if
  // nothing is in flight. 0: does what can be done now.
  virtual void progress(std::chrono::nanoseconds most) = 0;

  // Makes a progress() that sleeps return.
  virtual void wake() noexcept = 0;

  // False once the box is seen to be gone, also with nothing in flight; costs no system call.
  // Whoever copies from Grant::memory asks before and after.
  virtual bool alive() const noexcept = 0;

  // Becomes readable, or hangs up, when the box closes the connection: an idle client polls it for
  // POLLRDHUP. Negative: the transport looks by itself.
  virtual int liveness_fd() const noexcept = 0;

  // Transfers from and to this memory need no copy on their way until the handle goes; till then it
  // has to stay mapped as it is. Null: they are no faster for it on this transport.
  virtual std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes) {
    static_cast<void>(memory);
    static_cast<void>(bytes);
    return nullptr;
  }
};

struct TransportOptions {
  std::string host;  // tcp and verbs
  uint16_t port = 0;
  std::string path;                         // shm: of the box's Unix socket
  std::string token;                        // empty: none
  bool seal = true;                         // with a token, as the box does: box/protocol/seal.h
  smb::Join join{};                         // session, flags; the rest is filled in here
  uint32_t lanes = 4;                       // connections of tcp, queue pairs of verbs
  std::chrono::milliseconds timeout{5000};  // for connecting and proving
};

struct OpenedTransport {
  std::unique_ptr<Transport> transport;
  smb::Joined joined{};
};

// Throw Error(kNetwork) with the cause when the box cannot be reached or does not prove the token,
// and Refused when it answers with a status.
OpenedTransport open_tcp(const TransportOptions& opening);
OpenedTransport open_shm(const TransportOptions& opening);

// Why shm is not the transport between this process and a box that it has reached by another, in
// words that complete "no shm: ...". Empty: both run under one kernel, and the box's Unix socket
// answers here, which open_shm() takes to Joined::socket_path. The first kAlloc or kAttach proves
// the rest: its descriptor is mapped, or it fails.
//
// Threads: any. It does not block.
std::string why_no_shm(const smb::Joined& joined);

// The box said no to a Join.
class Refused : public Error {
 public:
  Refused(smb::Status status, const std::string& cause)
      : Error(ErrorKind::kNetwork, cause), status_(status) {}
  smb::Status status() const noexcept { return status_; }

 private:
  smb::Status status_;
};

}  // namespace hbm::transport
