// A Transport over stream sockets: the joined connections of a client, its lanes, and the threads
// that serve them. tcp has several, shm one to the box's Unix socket.
//
// Control requests travel on the first lane, in order. Transfers are cut in slices (slices.h). The
// caller's thread serves the first lane, in post() and progress(), and needs no other for small
// transfers; the further lanes have threads of their own, which start with the first transfer that
// the first lane alone does not take, and sleep when there is nothing for them.
//
// What is posted on an idle first lane is sent at once; else it waits for the next progress(), or
// for kGatheredBytes of its like, and goes out together with them.
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

namespace hbm::transport {

class HangupWatch;

// A kAlloc's or kAttach's arguments, read back from its body.
struct GrantRequest {
  uint32_t handle = 0;
  uint32_t flags = 0;  // of smb::Alloc
};

// REQUIRES: `request` is one of the two, with a body of its size.
inline GrantRequest grant_request(const TransportRequest& request) noexcept {
  if (request.opcode == smb::Opcode::kAlloc) {
    const auto alloc = smb::read_as<smb::Alloc>(request.body);
    return {alloc.handle, alloc.flags};
  }
  const auto attach = smb::read_as<smb::Attach>(request.body);
  return {attach.handle, attach.flags};
}

// Completes what the box granted by `request`, with what came with the reply. It may throw Error:
// the request then fails here, with kExhausted or kInternal, though the box has attached.
using CompleteGrant =
    std::function<void(Grant& grant, const TransportRequest& request, Descriptor descriptor)>;

class StreamTransport final : public Transport {
 public:
  // `streams` are joined, at least one; `box` is its name in messages.
  StreamTransport(smb::TransportKind kind, std::vector<std::unique_ptr<smb::FrameStream>> streams,
                  const std::string& box, CompleteGrant complete);
  ~StreamTransport() override;
  StreamTransport(const StreamTransport&) = delete;
  StreamTransport& operator=(const StreamTransport&) = delete;

  smb::TransportKind kind() const noexcept override { return kind_; }
  void post(TransportRequest& request) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override { wake_event_.signal(); }
  bool alive() const noexcept override;
  int liveness_fd() const noexcept override { return first().fd(); }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  class Lane final : public Connection::Requester {
   public:
    Lane(StreamTransport& all, std::unique_ptr<smb::FrameStream> stream, const std::string& box)
        : connection(std::move(stream), box, *this), all_(all) {}

    void answered(TransportRequest& request, Descriptor descriptor) override;
    void answered(const Slice& slice, smb::Status status, const std::string& cause) override;

    Connection connection;

   private:
    StreamTransport& all_;
  };

  Connection& first() const noexcept { return lanes_.front()->connection; }

  // All throw Error when a connection fails.
  void start(TransportRequest& request);
  bool turn(Deadline deadline);  // one sleep at most; false: woken
  void refill(Connection& lane);
  void serve(Connection& lane);  // until the transport stops

  void call_threads();
  void finished(const Lane& by) noexcept;
  void require_whole() const;
  void fail(const std::string& cause);

  const smb::TransportKind kind_;
  const CompleteGrant complete_;
  smb::WakeEvent wake_event_;  // ends the caller's sleep
  Slices slices_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::thread> threads_;  // of all lanes but the first, or none yet

  uint64_t posted_ = 0;                // the caller's
  bool more_ = false;                  // the caller's: the first lane may have more to receive
  std::atomic<uint64_t> finished_{0};  // requests
  std::atomic<bool> broken_{false};
  mutable std::mutex mutex_;  // guards cause_
  std::string cause_;         // why it is broken

  std::unique_ptr<HangupWatch> watch_;  // of all sockets
};

}  // namespace hbm::transport
