// A client's connection at a stream listener.
//
// Its loop reads it and serves its reads and writes. A reply that another thread has is sent by
// that thread if nobody is at work on the connection, and else by whoever is: the stream has one
// user at a time, who holds it.
//
// Threads: serve() and gone() are the loop's; dismiss(), part_from_ended_session(), idle() and the
// answers that the handler holds may be called from any thread. An answer that comes after gone()
// is dropped.
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

namespace hbm::box {

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
                               private smb::FrameReceiver,
                               public std::enable_shared_from_this<StreamConnection> {
 public:
  // Sends the Hello. Throws Error when the kernel or OpenSSL refuses.
  // REQUIRES: `context` and `loop` outlive gone().
  StreamConnection(StreamContext& context, EventLoop& loop, Descriptor socket,
                   smb::TransportKind transport);

  int fd() const noexcept { return fd_; }
  uint32_t events() const noexcept { return interest_; }  // to add it to the loop with

  EventLoop::Next serve(uint32_t events) noexcept override;
  void gone() noexcept override;
  void dismiss(const char* cause) noexcept override;

  // Closes it when its session has ended, at the second call that finds it so: by then its client
  // has had the time to take its last reply. Passes by a connection that somebody is at work on.
  void part_from_ended_session() noexcept;

  // Every request that was read has been answered, and the answer is sent.
  bool idle();

 private:
  struct Answered {
    smb::Header request;
    Reply reply;
  };

  // FrameReceiver: the stream calls these.
  const char* check(const smb::Header& header) override;
  std::byte* place(const smb::Header& header, std::span<const std::byte> body) override;
  void frame(const smb::Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override;

  // The caller of any of these holds the stream.
  EventLoop::Next work(uint32_t events);
  void join(const smb::Join& join);
  void read(const smb::Transfer& transfer);
  void begin_write(const smb::Transfer& transfer);
  void end_write();
  void submit(std::span<const std::byte> body);
  void reply(const smb::Header& request, Reply&& reply);
  Descriptor grant(Reply& reply) const;
  void refuse(const smb::Header& request, smb::Status status, const std::string& cause);
  void reject(smb::Status status, const std::string& cause);  // and end
  bool readable() const noexcept;                             // shall be read now
  bool send();                                                // false: the other end is gone
  void watch() noexcept;                                      // for what it waits for

  void take();             // the stream
  bool give();             // the stream; false: there are answers, and the caller keeps it
  bool settle() noexcept;  // sends all answers and gives the stream; false: it is over
  bool send_answers() noexcept;
  void answered(const smb::Header& request, Reply&& reply);

  StreamContext& context_;
  EventLoop& loop_;
  const smb::TransportKind transport_;
  const int fd_;

  // Used by the thread that holds the stream.
  Handshake handshake_;
  std::optional<smb::FrameStream> stream_;  // none after gone()
  std::shared_ptr<Session> session_;        // none: has not joined
  smb::Header request_{};                   // received last
  Access writing_;                          // where its payload goes
  uint64_t served_ = 0;                     // bytes, in this turn
  uint32_t unanswered_ = 0;
  uint32_t interest_ = 0;
  bool blocked_ = false;  // the kernel took no more output
  bool stalled_ = false;  // was left unread, for its replies' sake
  bool parting_ = false;  // its session was found ended
  bool over_ = false;     // nothing more is received or sent

  std::mutex mutex_;  // guards all below
  std::condition_variable given_;
  bool held_ = false;  // the stream
  bool gone_ = false;
  std::vector<Answered> answers_;
};

}  // namespace hbm::box
