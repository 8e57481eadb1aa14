// Sends frames over a stream socket: one half of a FrameStream.
//
// A system call that passes the descriptor of a frame sends bytes of this frame only, so the
// descriptor arrives with bytes of its own frame. FrameInput relies on this.
//
// Payloads in private memory are sent without a copy. Payloads in shared memory are copied first,
// one buffer at a time and element by element (elements.h), because a copy by the kernel can end
// inside an element. With authentication every payload is copied too, so a concurrent write cannot
// change bytes that a tag covers. The content of the buffer is then one record (authenticator.h).
//
// Threads: one at a time.
#pragma once

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

class FrameOutput {
 public:
  explicit FrameOutput(Payloads payloads) : shared_(payloads == Payloads::kShared) {}

  // As FrameStream::queue().
  void queue(Header header, std::span<const std::byte> body, std::span<const std::byte> payload,
             std::shared_ptr<const void> hold, Descriptor descriptor);

  // Sends records with tags under `key` from now on. REQUIRES: nothing is queued.
  void authenticate(const MacKey& key) { authenticator_.emplace(key); }

  // Returns the bytes queued and not sent. Bytes copied into the buffer count until the whole
  // buffer is sent.
  uint64_t bytes() const noexcept { return bytes_; }

  enum class Flushed { kSent, kBlocked, kClosed };
  Flushed flush(int socket);

 private:
  struct QueuedFrame {
    std::array<std::byte, sizeof(Header) + kMaxBody> head;
    uint64_t head_bytes;  // header and body
    std::span<const std::byte> payload;
    std::shared_ptr<const void> hold;
    Descriptor descriptor;

    uint64_t bytes() const noexcept { return head_bytes + payload.size(); }
  };

  class Gathering;
  int gather(Gathering& gathering);  // returns the descriptor to pass, or -1
  void copy();                       // REQUIRES: a frame is queued
  uint64_t copy_frames(std::byte* to);
  void drop(uint64_t sent);
  bool copies() const noexcept { return shared_ || authenticator_; }

  const bool shared_;
  std::deque<QueuedFrame> frames_;
  uint64_t first_sent_ = 0;  // bytes of the first frame that are sent or copied
  uint64_t bytes_ = 0;

  // Used only if copies() is true: then payloads are copied before they are sent.
  std::optional<Authenticator> authenticator_;
  std::unique_ptr<std::byte[]> buffer_;  // allocated when first used
  std::span<const std::byte> copied_;    // in the buffer and not sent
  uint64_t copied_bytes_ = 0;            // bytes of frames in the buffer
  Descriptor passed_;                    // passed with the first byte of the buffer
};

}  // namespace hbm::box::protocol
