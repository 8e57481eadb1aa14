#include "box/verbs/server/request_message.h"

#include <string>

#include "base/error.h"

namespace hbm::box::verbs::server {
namespace {

using protocol::Opcode;

uint32_t handle_of(Opcode opcode, std::span<const std::byte> body) {
  if (opcode == Opcode::kAlloc) return protocol::read_as<protocol::Alloc>(body).handle;
  if (opcode == Opcode::kAttach) return protocol::read_as<protocol::Attach>(body).handle;
  if (opcode == Opcode::kFree) return protocol::read_as<protocol::Release>(body).handle;
  return 0;
}

// Returns the fault in a message that begins with `header`, or null.
const char* malformed(const protocol::Header& header, size_t message_bytes) {
  if (const char* cause = malformed_request(header)) return cause;
  if (header.opcode == Opcode::kJoin) return "a queue pair is let in by its connection request";
  if (header.opcode == Opcode::kRead || header.opcode == Opcode::kWrite) {
    return "over RDMA reads and writes are one-sided";
  }
  return sizeof(header) + header.body_bytes == message_bytes ? nullptr : "it has another size";
}

}  // namespace

RequestMessage parse_request(std::span<const std::byte> message) {
  if (message.size() < sizeof(protocol::Header)) {
    throw Error(ErrorKind::kNetwork, "its message has no header");
  }
  const auto header = protocol::read_as<protocol::Header>(message);
  if (const char* cause = malformed(header, message.size())) {
    throw Error(ErrorKind::kNetwork, std::string("its message is no request: ") + cause);
  }
  const auto body = message.subspan(sizeof(header));
  return {header, body, handle_of(header.opcode, body)};
}

}  // namespace hbm::box::verbs::server
