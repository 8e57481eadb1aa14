// A box's reply as bytes to send over RDMA: a header, and the body and the payload of the opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"

namespace hbm::verbs {

// The reply to the request `id`. A refusal has no body, and its cause is cut to smb::kMaxCause.
// REQUIRES: a payload is not longer than smb::kMaxPayload.
std::vector<std::byte> reply_message(uint64_t id, smb::Opcode opcode, const box::Reply& reply);

}  // namespace hbm::verbs
