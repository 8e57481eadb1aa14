// Frames over a stream socket (TCP or Unix), in both directions, without blocking.
//
// Output: frames queue up while the kernel takes no more, and go out together, headers and payloads
// gathered in as few system calls as it allows. Input: headers, bodies and small payloads come
// through a small buffer, many at a time; the bulk of a payload is received straight into its
// destination.
//
// Payloads in memory that others use at the same time (Payloads::kShared) are copied once more in
// either direction, in this process, element by element: an aligned element of up to 8 bytes that
// lies wholly in the payload is sent as it was at one moment, and appears whole at its destination.
// It is atomic accesses that promise it, however the kernel cuts and delays what is in between.
//
// After the join both directions can be sealed (seal.h). A frame, or a part of a payload, is then
// handed on only after the piece that it came in was checked.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/descriptor.h"
#include "box/protocol/elements.h"
#include "box/protocol/frame_input.h"
#include "box/protocol/frame_output.h"
#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"

namespace hbm::smb {

class FrameStream {
 public:
  enum class Flow {
    kIdle,     // flush: all is sent; receive: the kernel had no more, ask poll for the next
    kBlocked,  // flush: the kernel takes no more for now
    kMore,     // receive: `most` bytes were taken, or paused; there may be more, also here
    kClosed,   // the other end is gone
  };

  using Receiver = FrameReceiver;

  // The socket is made non-blocking. `payloads`: whose memory they lie in, at this end.
  explicit FrameStream(Descriptor socket, Payloads payloads = Payloads::kOwn);
  FrameStream(const FrameStream&) = delete;
  FrameStream& operator=(const FrameStream&) = delete;

  int fd() const noexcept { return socket_.get(); }

  // Queues a frame; body_bytes and payload_bytes are set from the spans. The body is copied; the
  // payload is not, and `hold` keeps it until it is sent or, as said above, copied. `descriptor`
  // goes with the frame's first byte (Unix sockets alone). REQUIRES: sizes within the protocol's.
  void queue(Header header, std::span<const std::byte> body,
             std::span<const std::byte> payload = {}, std::shared_ptr<const void> hold = nullptr,
             Descriptor descriptor = Descriptor());

  // Seals what is queued from now on, and what arrives behind the frame that was taken last. A
  // Receiver may call it. Throws Error(kNetwork) if something queued is not sent yet.
  void seal(const SealKey& sending, const SealKey& receiving);

  // Not sent yet; where payloads are copied, that of a whole copy until all of it is sent.
  uint64_t queued_bytes() const noexcept { return output_.bytes(); }

  // Sends what the kernel takes. Throws Error(kNetwork) for failures other than a closed end.
  Flow flush();

  // Receives what is there, up to about `most` bytes. Throws Error(kNetwork) for frames that
  // check() rejects and for failures other than a closed end, Forged for a piece that is not the
  // one that was sent.
  Flow receive(Receiver& receiver, uint64_t most);

  // Called by a Receiver: receive() returns kMore after this frame.
  void pause() noexcept { paused_ = true; }

 private:
  const Descriptor socket_;
  FrameOutput output_;
  FrameInput input_;
  bool paused_ = false;
};

}  // namespace hbm::smb
