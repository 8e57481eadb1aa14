// Sends frames over a stream socket: one half of a FrameStream.
//
// A frame with a descriptor is handed to the kernel in a call of its own, so that the descriptor
// arrives with bytes of that frame and of none behind it; FrameInput relies on that.
//
// Payloads in memory of their owner's are sent from where they lie. Those in shared memory are
// copied first, a buffer at a time and element by element (see elements.h), and sent from the copy,
// also what the kernel takes later only: its own copies would end in the midst of elements. What is
// sealed (seal.h) is copied too: the bytes that are sent are then those of the tag, whatever is
// done to the payload meanwhile. A copy is a piece.
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
#include "box/protocol/elements.h"
#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"

namespace hbm::smb {

class FrameOutput {
 public:
  explicit FrameOutput(Payloads payloads) : shared_(payloads == Payloads::kShared) {}

  // See FrameStream.
  void queue(Header header, std::span<const std::byte> body, std::span<const std::byte> payload,
             std::shared_ptr<const void> hold, Descriptor descriptor);

  // Seals with `key` all that is queued from now on. REQUIRES: nothing is queued.
  void seal(const SealKey& key) { seal_.emplace(key); }

  // Queued, and not sent; of copies, until all of one is sent.
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
  int gather(Gathering& gathering);  // the descriptor that goes along, or -1
  void copy();                       // REQUIRES: there is a frame
  uint64_t copy_frames(std::byte* to);
  void drop(uint64_t sent);
  bool copies() const noexcept { return shared_ || seal_; }

  const bool shared_;
  std::deque<QueuedFrame> frames_;
  uint64_t first_sent_ = 0;  // bytes of the first frame that are sent, or copied
  uint64_t bytes_ = 0;

  // copies() alone: payloads are copied before they are sent.
  std::optional<Seal> seal_;
  std::unique_ptr<std::byte[]> buffer_;  // made when it is needed
  std::span<const std::byte> copied_;    // in the buffer, and not sent
  uint64_t copied_bytes_ = 0;            // of frames in the buffer
  Descriptor passed_;                    // goes with its first byte
};

}  // namespace hbm::smb
