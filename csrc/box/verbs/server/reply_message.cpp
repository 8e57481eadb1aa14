#include "box/verbs/server/reply_message.h"

#include <algorithm>
#include <span>

namespace hbm::box::verbs::server {

std::vector<std::byte> reply_message(uint64_t id, protocol::Opcode opcode,
                                     const box::server::Reply& reply) {
  std::span<const std::byte> body;
  std::span<const std::byte> payload = std::as_bytes(protocol::sent_cause(reply.cause));
  if (reply.status == protocol::Status::kOk) {
    body = reply.body;
    payload = reply.payload;
  }
  protocol::Header header;
  header.opcode = opcode;
  header.status = reply.status;
  header.body_bytes = static_cast<uint32_t>(body.size());
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  header.id = id;
  std::vector<std::byte> message;
  message.reserve(sizeof(header) + body.size() + payload.size());
  for (const auto part : {std::as_bytes(std::span(&header, 1)), body, payload}) {
    message.insert(message.end(), part.begin(), part.end());
  }
  return message;
}

}  // namespace hbm::box::verbs::server
