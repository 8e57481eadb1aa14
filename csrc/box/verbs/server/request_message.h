// A client's request as a message over RDMA: a header, and a body of the opcode's size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "box/protocol/protocol.h"

namespace hbm::verbs {

struct RequestMessage {
  smb::Header header;
  std::span<const std::byte> body;  // of the message
  uint32_t handle = 0;              // of the attachment that it makes or ends; else 0
};

// Throws Error(kNetwork) that says what is wrong with it. Joins, reads and writes are no requests
// over RDMA.
RequestMessage parse_request(std::span<const std::byte> message);

}  // namespace hbm::verbs
