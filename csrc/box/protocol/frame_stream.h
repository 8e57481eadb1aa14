// Frames over a stream socket (TCP or Unix), in both directions, without blocking.
//
// Output: frames queue while the socket is full, and are sent together with as few system calls as
// possible. Input: headers, bodies and short payloads arrive through a buffer, many per call; the
// bulk of a long payload is received at its destination.
//
// Payloads in shared memory (Payloads::kShared) take one more copy in this process, element by
// element. Each aligned element of up to 8 bytes is loaded and stored by one atomic access. So the
// element is sent with one value, and becomes visible at its destination as a whole, however
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
    kMore,     // receive: `most` bytes were received, or paused; call again without polling
    kClosed,   // the peer has closed the connection
  };

  using Receiver = FrameReceiver;

  // Makes the socket non-blocking. `payloads`: the memory of the payloads at this end. Throws
  // Error(kInvalid) if `socket` is no socket.
  explicit FrameStream(Descriptor socket, Payloads payloads = Payloads::kPrivate);
  FrameStream(const FrameStream&) = delete;
  FrameStream& operator=(const FrameStream&) = delete;

  int fd() const noexcept { return socket_.get(); }

  // Queues a frame, with body_bytes and payload_bytes set from the spans. Copies the body. Does not
  // copy the payload: `hold` keeps it alive until it is sent or copied as described above.
  // `descriptor` is passed with the first byte of the frame (Unix sockets only). REQUIRES: sizes
  // within the limits of the protocol.
  void queue(Header header, std::span<const std::byte> body,
             std::span<const std::byte> payload = {}, std::shared_ptr<const void> hold = nullptr,
             Descriptor descriptor = Descriptor());

  // Authenticates frames queued from now on, and frames received after the last consumed one. A
  // Receiver may call it from frame(). Throws Error(kNetwork) if a queued frame is not sent yet.
  void authenticate(const MacKey& sending, const MacKey& receiving);

  // Returns the bytes queued and not sent. A copied buffer counts until all of it is sent.
  uint64_t queued_bytes() const noexcept { return output_.bytes(); }

  // Sends until the socket is full. Throws Error(kNetwork) for any failure except a closed
  // connection.
  Flow flush();

  // Receives until the socket is empty, or for about `most` bytes. Throws Error(kNetwork) for a
  // frame that check() rejects and for any failure except a closed connection; Forged for a record
  // with a wrong tag.
  Flow receive(Receiver& receiver, uint64_t most);

  // Makes receive() return kMore after this frame. Called by a Receiver.
  void pause() noexcept { paused_ = true; }

 private:
  const Descriptor socket_;
  FrameOutput output_;
  FrameInput input_;
  bool paused_ = false;
};

}  // namespace hbm::box::protocol
