// Receives frames from a stream socket: one half of a FrameStream.
//
// The stream has one receive buffer. If the payload goes to private memory, only the head of a long
// frame passes through the buffer. One system call receives the rest of the payload at its
// destination, and the start of the next frame in the buffer.
//
// If the payload goes to shared memory, every byte passes through the buffer and is stored element
// by element (elements.h). The kernel does not copy to the destination, because its copy can end
// inside an element, at a packet boundary. An incomplete element stays in the buffer until its
// other bytes have arrived.
//
// Records (authenticator.h) pass through the buffer too, one at a time. No frame is parsed from a
// record before its tag is verified.
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
#include "box/protocol/authenticator.h"
#include "box/protocol/elements.h"
#include "box/protocol/protocol.h"

namespace hbm::box::protocol {

// Consumes received frames. receive() passes on any exception of a member. The stream must not be
// used after an exception.
class FrameReceiver {
 public:
  // Checks a header before its sizes are used. Returns null if it is valid, else the fault:
  // receive() then throws Error(kNetwork) with the fault.
  virtual const char* check(const Header& header) = 0;

  // Returns where to store the payload, header.payload_bytes long, or null to skip it. Called once
  // per frame with a payload, before frame().
  virtual std::byte* payload_destination(const Header& header, std::span<const std::byte> body) = 0;

  // Called for each complete frame. `descriptor`: the one passed with the frame over a Unix socket,
  // or none. `body` is valid during the call only.
  virtual void frame(const Header& header, std::span<const std::byte> body,
                     Descriptor descriptor) = 0;

 protected:
  ~FrameReceiver() = default;
};

class FrameInput {
 public:
  // `passes_descriptors`: true if the socket is a Unix socket.
  FrameInput(bool passes_descriptors, Payloads payloads)
      : passes_descriptors_(passes_descriptors), shared_(payloads == Payloads::kShared) {}

  enum class Received { kIdle, kMore, kClosed };

  // Expects records with tags under `key` after the frame that was consumed last.
  void authenticate(const MacKey& key);

  // As FrameStream::receive(). Also returns after a frame if `receiver` sets `paused` while it
  // consumes the frame.
  Received receive(int socket, FrameReceiver& receiver, uint64_t most, const bool& paused);

 private:
  struct Arrived {
    uint64_t last_byte;  // position in the stream of the last byte received with the descriptor
    Descriptor descriptor;
  };

  bool take_frame(FrameReceiver& receiver);  // from the buffer; false: the frame is incomplete
  bool take_head(FrameReceiver& receiver);
  Descriptor take_descriptor();

  struct Filled {
    Received received;
    uint64_t bytes;
    bool drained;  // the socket had less than requested
  };
  Filled fill(int socket);
  Filled fill_records(int socket);
  void make_room();
  uint64_t record_bytes()
      const;             // length of the next record with its tag. REQUIRES: its header has arrived
  bool verify_record();  // false: the record is incomplete
  void keep_descriptor(msghdr& message, uint64_t last_byte);

  uint64_t buffered() const noexcept { return end_ - begin_; }
  void consume(std::byte* to, uint64_t bytes);  // null: discards them
  void consume_payload();

  const bool passes_descriptors_;
  const bool shared_;
  std::unique_ptr<std::byte[]> buffer_;  // allocated before the first receive
  uint64_t begin_ = 0;                   // first byte that is not consumed
  uint64_t end_ = 0;
  uint64_t consumed_ = 0;  // bytes of the stream

  // With records: [begin_, end_) is verified, [next_record_, arrived_end_) is not.
  std::optional<Authenticator> authenticator_;
  uint64_t next_record_ = 0;
  uint64_t arrived_end_ = 0;

  std::deque<Arrived> descriptors_;

  // The frame that is being received.
  bool checked_ = false;     // the header has arrived and passed check()
  bool in_payload_ = false;  // the body has arrived too
  Header header_{};
  std::array<std::byte, kMaxBody> body_;
  std::byte* destination_ = nullptr;  // of the payload bytes that are missing
  uint64_t payload_left_ = 0;
};

}  // namespace hbm::box::protocol
