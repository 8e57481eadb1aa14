// A client's request as a message over RDMA: a header, and a body of the size for the opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "box/protocol/protocol.h"

namespace hbm::box::verbs::server {

struct RequestMessage {
  protocol::Header header;
  std::span<const std::byte> body;  // part of the message
  uint32_t handle = 0;              // of the attachment that the request makes or ends, else 0
};

// Throws Error(kNetwork), with the fault, if the message is no valid request. Joins, reads and
// writes are no requests over RDMA.
RequestMessage parse_request(std::span<const std::byte> message);

}  // namespace hbm::box::verbs::server
