// What is done with frames that arrive on a FrameStream.
#pragma once

#include <cstddef>
#include <span>

#include "base/descriptor.h"
#include "box/protocol/protocol.h"

namespace hbm::smb {

// What these members throw goes through receive(), after which the stream is of no further use.
class FrameReceiver {
 public:
  // A header, before any of its sizes is used: null, or what is wrong with it. receive() then
  // throws Error(kNetwork).
  virtual const char* check(const Header& header) = 0;

  // Where the payload of this frame goes, all `header.payload_bytes` of it; called once, if there
  // is one. Null: the stream reads it past.
  virtual std::byte* place(const Header& header, std::span<const std::byte> body) = 0;

  // A whole frame. `descriptor` came with it on a Unix socket, or is none. `body` is gone
  // afterwards.
  virtual void frame(const Header& header, std::span<const std::byte> body,
                     Descriptor descriptor) = 0;

 protected:
  ~FrameReceiver() = default;
};

}  // namespace hbm::smb
