// Receives frames from a stream socket: one half of a FrameStream.
//
// One buffer takes what arrives. Where payloads go into memory of their owner's, only the head of a
// frame with much payload goes through it: the rest is received where it belongs, in the same call
// as the start of the next frame.
//
// Into shared memory everything goes through the buffer, and from there element by element (see
// elements.h): an element of which a part has arrived stays in the buffer until all of it is here.
// The kernel's own copies would end in the midst of elements wherever its packets do.
//
// Sealed bytes (seal.h) go through the buffer as well, a piece at a time, and no frame is taken
// from a piece before its tag was checked.
//
// Threads: one at a time.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>

#include "base/descriptor.h"
#include "box/protocol/elements.h"
#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"

namespace hbm::smb {

// Takes the frames that arrive. An exception that a member throws passes through receive(), after
// which the stream is of no further use.
class FrameReceiver {
 public:
  // A header, before any of its sizes is used: null, or what is wrong with it. receive() then
  // throws Error(kNetwork).
  virtual const char* check(const Header& header) = 0;

  // Returns where all `header.payload_bytes` of this frame's payload go; called once, if there is
  // one. Null: the stream skips it.
  virtual std::byte* place(const Header& header, std::span<const std::byte> body) = 0;

  // A whole frame. `descriptor` came with it on a Unix socket, or is none. `body` is gone
  // afterwards.
  virtual void frame(const Header& header, std::span<const std::byte> body,
                     Descriptor descriptor) = 0;

 protected:
  ~FrameReceiver() = default;
};

class FrameInput {
 public:
  // `passes_descriptors`: the socket is a Unix one.
  FrameInput(bool passes_descriptors, Payloads payloads)
      : passes_descriptors_(passes_descriptors), shared_(payloads == Payloads::kShared) {}

  enum class Received { kIdle, kMore, kClosed };

  // Expects everything after the frame that was taken last to be sealed with `key`.
  void seal(const SealKey& key);

  // See FrameStream::receive. Returns after a frame that sets `paused`.
  Received receive(int socket, FrameReceiver& receiver, uint64_t most, const bool& paused);

 private:
  struct Arrived {
    uint64_t place;  // in the stream: of the last byte that came with it
    Descriptor descriptor;
  };

  bool take_frame(FrameReceiver& receiver);  // out of the buffer; false: it is not complete
  bool take_head(FrameReceiver& receiver);
  Descriptor take_descriptor();

  struct Filled {
    Received received;
    uint64_t bytes;
    bool drained;  // less came than was asked for
  };
  Filled fill(int socket);
  Filled fill_sealed(int socket);
  void make_room();
  uint64_t piece_bytes() const;  // of all of the next piece. REQUIRES: its header is here
  bool open_piece();             // false: it is not complete
  void keep_descriptor(msghdr& message, uint64_t place);

  uint64_t buffered() const noexcept { return end_ - begin_; }
  void consume(std::byte* to, uint64_t bytes);  // null: drops them
  void consume_payload();

  const bool passes_descriptors_;
  const bool shared_;
  std::unique_ptr<std::byte[]> buffer_;  // made when the first byte is expected
  uint64_t begin_ = 0;                   // of what is not consumed yet
  uint64_t end_ = 0;
  uint64_t consumed_ = 0;  // bytes of the stream

  // Sealed: from begin_ to end_ lies what is opened, then what is not.
  std::optional<Seal> seal_;
  uint64_t next_piece_ = 0;
  uint64_t arrived_end_ = 0;

  std::deque<Arrived> descriptors_;

  // The frame that is under way.
  bool checked_ = false;     // its header is here, and has been looked at
  bool in_payload_ = false;  // its body is here too
  Header header_{};
  std::array<std::byte, kMaxBody> body_;
  std::byte* destination_ = nullptr;  // of the rest of the payload
  uint64_t payload_left_ = 0;
};

}  // namespace hbm::smb
