// A box's reply as bytes for RDMA: a header, and the body and payload for the opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"

namespace hbm::box::verbs::server {

// Returns the reply to request `id`. A refusal has no body, and a cause of at most
// protocol::kMaxCause bytes. REQUIRES: the payload has at most protocol::kMaxPayload bytes.
std::vector<std::byte> reply_message(uint64_t id, protocol::Opcode opcode,
                                     const box::server::Reply& reply);

}  // namespace hbm::box::verbs::server
