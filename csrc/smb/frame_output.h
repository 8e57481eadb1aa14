// Frames on their way into a stream socket: the sending half of a FrameStream.
//
// A frame with a descriptor is handed to the kernel in a call of its own, so that the descriptor
// arrives with bytes of that frame and of none behind it; FrameInput relies on that.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "base/descriptor.h"
#include "smb/protocol.h"

namespace hbm::smb {

class FrameOutput {
 public:
  // See FrameStream.
  void queue(Header header, std::span<const std::byte> body, std::span<const std::byte> payload,
             std::shared_ptr<const void> hold, Descriptor descriptor);

  uint64_t bytes() const noexcept { return bytes_; }  // queued, and not sent

  enum class Result { kSent, kBlocked, kClosed };
  Result flush(int socket);

 private:
  struct Frame {
    std::array<std::byte, sizeof(Header) + kMaxBody> head;
    uint64_t head_bytes;  // header and body
    std::span<const std::byte> payload;
    std::shared_ptr<const void> hold;
    Descriptor descriptor;

    uint64_t bytes() const noexcept { return head_bytes + payload.size(); }
  };

  void drop(uint64_t sent);

  std::deque<Frame> frames_;
  uint64_t first_sent_ = 0;  // bytes of the first frame that are sent
  uint64_t bytes_ = 0;
};

}  // namespace hbm::smb
