// Sends and receives frames over a stream socket (TCP or Unix), without blocking.
//
// Output: while the socket is full, frames wait in a queue. They are then sent together, with as
// few system calls as possible. Input: one system call receives many headers, bodies and short
// payloads into a buffer. Most of a long payload is received directly at its destination.
//
// Payloads in shared memory (Payloads::kShared) take one more copy in this process, element by
// element. Each aligned element of up to 8 bytes is loaded and stored by one atomic access. So no
// half-written element is sent. At the destination an element becomes visible as a whole, wherever
// packets cut the stream.
//
// After the join both directions can be authenticated (authenticator.h). A frame, or part of a
// payload, is handed on only after the tag of its record is verified.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/descriptor.h"
#include "box/protocol/authenticator.h"
#include "box/protocol/elements.h"
#include "box/protocol/frame_input.h"
#include "box/protocol/frame_output.h"
#include "box/protocol/protocol.h"

namespace hbm::box::protocol {

class FrameStream {
 public:
  enum class Flow {
    kIdle,     // flush: everything is sent; receive: the socket is empty, poll it
    kBlocked,  // flush: the socket is full
    kMore,     // receive: `most` bytes were received, or pause() was called; call again without
               // polling
    kClosed,   // the peer has closed the connection
  };

  using Receiver = FrameReceiver;

  // Makes the socket non-blocking. `payloads`: the kind of memory that this end's payloads are in.
  // Throws Error(kInvalid) if `socket` is no socket.
  explicit FrameStream(Descriptor socket, Payloads payloads = Payloads::kPrivate);
  FrameStream(const FrameStream&) = delete;
  FrameStream& operator=(const FrameStream&) = delete;

  int fd() const noexcept { return socket_.get(); }

  // Queues a frame. Sets body_bytes and payload_bytes of its header from the spans. Copies the
  // body, but not the payload: `hold` keeps the payload alive until it is sent or copied as
  // described above. `descriptor` is passed with the first byte of the frame (Unix sockets only).
  // REQUIRES: the sizes are within the limits of the protocol.
  void queue(Header header, std::span<const std::byte> body,
             std::span<const std::byte> payload = {}, std::shared_ptr<const void> hold = nullptr,
             Descriptor descriptor = Descriptor());

  // Authenticates frames queued from now on, and frames received after the last consumed one. A
  // Receiver may call it from frame(). Throws Error(kNetwork) if a queued frame is not sent yet.
  void authenticate(const MacKey& sending, const MacKey& receiving);

  // Returns the bytes queued and not sent. Bytes copied into a buffer count until the whole buffer
  // is sent.
  uint64_t queued_bytes() const noexcept { return output_.bytes(); }

  // Sends until the socket is full. Throws Error(kNetwork) for any failure except a closed
  // connection.
  Flow flush();

  // Receives until the socket is empty, or for about `most` bytes. Throws Error(kNetwork) for a
  // frame that check() rejects and for any failure except a closed connection; Forged for a record
  // with a wrong tag.
  Flow receive(Receiver& receiver, uint64_t most);

  // A Receiver calls it: makes receive() return kMore after the current frame.
  void pause() noexcept { paused_ = true; }

 private:
  const Descriptor socket_;
  FrameOutput output_;
  FrameInput input_;
  bool paused_ = false;
};

}  // namespace hbm::box::protocol
