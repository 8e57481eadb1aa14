// A client's connection at a stream listener.
//
// The event loop reads the connection and serves its reads and writes. One thread at a time holds
// the stream and uses it. A thread that has a reply sends the reply if it can acquire the stream.
// Otherwise the thread that holds the stream sends the reply.
//
// Threads: the thread of the loop calls serve() and gone(). Any thread may call dismiss(),
// close_if_session_ended(), idle(), and the Answers that the handler has. A reply that comes after
// gone() is dropped.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/protocol/protocol.h"
#include "box/server/listener/admission.h"
#include "box/server/listener/event_loop.h"
#include "box/server/request_handler.h"

namespace hbm::box::server::listener {

// The state that all connections of a listener share.
struct StreamContext {
  RequestHandler& handler;
  const ListenerIdentity identity;
  const uint64_t quantum;
  PendingConnections pending;
  LogLimiter refusals;
  std::atomic<bool> draining{false};
};

class StreamConnection final : public EventLoop::Served,
                               public PendingConnections::JoiningConnection,
                               private protocol::FrameReceiver,
                               public std::enable_shared_from_this<StreamConnection> {
 public:
  // Sends the Hello. Throws Error if the kernel or OpenSSL fails. REQUIRES: `context` and `loop`
  // outlive gone().
  StreamConnection(StreamContext& context, EventLoop& loop, Descriptor socket,
                   protocol::TransportKind transport);

  int fd() const noexcept { return fd_; }
  uint32_t events() const noexcept { return interest_; }  // for EventLoop::add()

  EventLoop::Next serve(uint32_t events) noexcept override;
  void gone() noexcept override;
  void dismiss(const char* cause) noexcept override;

  // Closes the connection at the second call that finds its session ended, so that its client can
  // receive the last reply. Skips a connection whose stream is held.
  void close_if_session_ended() noexcept;

  // Returns true if every request that was read is answered, and the replies are sent.
  bool idle();

 private:
  struct Answered {
    protocol::Header request;
    Reply reply;
  };

  // FrameReceiver, called by the stream.
  const char* check(const protocol::Header& header) override;
  std::byte* payload_destination(const protocol::Header& header,
                                 std::span<const std::byte> body) override;
  void frame(const protocol::Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override;

  // acquire() takes the hold on the stream. All other functions below, except answered(), REQUIRE
  // that the caller has the hold.
  EventLoop::Next work(uint32_t events);
  void join(const protocol::Join& join);
  void read(const protocol::Transfer& transfer);
  void begin_write(const protocol::Transfer& transfer);
  void end_write();
  void submit(std::span<const std::byte> body);
  void reply(const protocol::Header& request, Reply&& reply);
  Descriptor grant(Reply& reply) const;
  void refuse(const protocol::Header& request, protocol::Status status, const std::string& cause);
  // Refuses the last request, and closes the connection.
  void reject(protocol::Status status, const std::string& cause);
  bool readable() const noexcept;  // true: read the socket now
  bool send();                     // false: the peer has closed
  void watch() noexcept;           // updates the events of epoll

  void acquire();          // waits for the hold on the stream
  bool release();          // false: answers are queued, and the caller keeps the hold
  bool settle() noexcept;  // sends all answers and releases the stream; false: the connection ends
  bool send_answers() noexcept;
  void answered(const protocol::Header& request, Reply&& reply);

  StreamContext& context_;
  EventLoop& loop_;
  const protocol::TransportKind transport_;
  const int fd_;

  // Used by the thread that holds the stream.
  Handshake handshake_;
  std::optional<protocol::FrameStream> stream_;  // none after gone()
  std::shared_ptr<Session> session_;             // none: the client has not joined
  protocol::Header request_{};                   // the header received last
  Access writing_;                               // the destination of a kWrite's payload
  uint64_t served_ = 0;                          // bytes served in this turn
  uint32_t unanswered_ = 0;
  uint32_t interest_ = 0;
  bool blocked_ = false;        // the socket is full
  bool stalled_ = false;        // readable() was false at the last check
  bool session_ended_ = false;  // close_if_session_ended() has found the session ended once
  bool over_ = false;           // no more frames are received or sent

  std::mutex mutex_;  // guards all below
  std::condition_variable released_;
  bool held_ = false;  // true: a thread holds the stream
  bool gone_ = false;
  std::vector<Answered> answers_;
};

}  // namespace hbm::box::server::listener
