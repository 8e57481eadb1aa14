// A Transport over stream sockets: the joined connections of a client, and the threads that serve
// them. tcp has several connections, shm has one to the Unix socket of the box.
//
// Control requests are sent on the first connection, in order. Transfers are cut into slices
// (slices.h). The caller's thread serves the first connection, in post() and progress(). The other
// connections have threads, which start with the first transfer that does not fit on the first
// connection, and sleep while there are no slices.
//
// A request on an idle first connection is sent immediately. Otherwise it is sent by the next
// progress(), or together with others once kGatheredBytes are queued.
//
// Threads: as Transport.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/protocol/wake_event.h"
#include "box/transport/connection.h"
#include "box/transport/slices.h"
#include "box/transport/transport.h"

namespace hbm::box::transport {

class HangupWatch;

// The arguments of a kAlloc or kAttach, read from its body.
struct GrantRequest {
  uint32_t handle = 0;
  uint32_t flags = 0;  // of protocol::Alloc
};

// REQUIRES: `request` is a kAlloc or kAttach, and its body has the size for this opcode.
inline GrantRequest grant_request(const TransportRequest& request) noexcept {
  if (request.opcode == protocol::Opcode::kAlloc) {
    const auto alloc = protocol::read_as<protocol::Alloc>(request.body);
    return {alloc.handle, alloc.flags};
  }
  const auto attach = protocol::read_as<protocol::Attach>(request.body);
  return {attach.handle, attach.flags};
}

// Completes `grant`, made from the box's reply to `request`, with the descriptor that was passed
// with the reply. May throw Error: the request then fails at the client with kExhausted or
// kInternal, although the box has made the attachment.
using CompleteGrant =
    std::function<void(Grant& grant, const TransportRequest& request, Descriptor descriptor)>;

class StreamTransport final : public Transport {
 public:
  // `streams`: at least one, all joined. `box`: the name of the box, for the texts of errors.
  StreamTransport(protocol::TransportKind kind,
                  std::vector<std::unique_ptr<protocol::FrameStream>> streams,
                  const std::string& box, CompleteGrant complete);
  ~StreamTransport() override;
  StreamTransport(const StreamTransport&) = delete;
  StreamTransport& operator=(const StreamTransport&) = delete;

  protocol::TransportKind kind() const noexcept override { return kind_; }
  void post(TransportRequest& request) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override { wake_event_.signal(); }
  bool alive() const noexcept override;
  int liveness_fd() const noexcept override { return first().fd(); }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  class PooledConnection final : public Connection::Requester {
   public:
    PooledConnection(StreamTransport& all, std::unique_ptr<protocol::FrameStream> stream,
                     const std::string& box)
        : connection(std::move(stream), box, *this), all_(all) {}

    void answered(TransportRequest& request, Descriptor descriptor) override;
    void answered(const Slice& slice, protocol::Status status, const std::string& cause) override;

    Connection connection;

   private:
    StreamTransport& all_;
  };

  Connection& first() const noexcept { return connections_.front()->connection; }

  // start(), turn(), refill() and serve() throw Error if a connection fails.
  void start(TransportRequest& request);
  bool turn(Deadline deadline);  // sleeps at most once; returns false if wake_event_ was signalled
  void refill(Connection& connection);
  void serve(Connection& connection);  // returns when the transport stops

  void wake_threads();
  void finished(const PooledConnection& by) noexcept;
  void require_whole() const;
  void fail(const std::string& cause);

  const protocol::TransportKind kind_;
  const CompleteGrant complete_;
  protocol::WakeEvent wake_event_;  // ends the caller's sleep
  Slices slices_;
  std::vector<std::unique_ptr<PooledConnection>> connections_;
  std::vector<std::thread> threads_;  // of all connections except the first; empty until needed

  uint64_t posted_ = 0;  // used by the caller only
  bool more_ = false;    // used by the caller only: the first connection may have more to receive
  std::atomic<uint64_t> finished_{0};  // requests
  std::atomic<bool> broken_{false};
  mutable std::mutex mutex_;  // guards cause_
  std::string cause_;         // why it is broken

  std::unique_ptr<HangupWatch> watch_;  // of all sockets
};

}  // namespace hbm::box::transport
