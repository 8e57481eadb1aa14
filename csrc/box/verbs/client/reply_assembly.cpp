#include "box/verbs/client/reply_assembly.h"

#include <string>
#include <utility>

namespace hbm::box::verbs::client {
namespace {

using protocol::Opcode;
using protocol::Status;

protocol::Header header_of(std::span<const std::byte> frame) {
  if (frame.size() < sizeof(protocol::Header)) {
    throw transport::Broken("the memory box sent a message without a header");
  }
  return protocol::read_as<protocol::Header>(frame);
}

uint64_t frame_bytes(const protocol::Header& header) {
  return sizeof(header) + uint64_t{header.body_bytes} + header.payload_bytes;
}

// Returns true if a reply to `opcode` may have a payload: statistics, or a segment's remote keys.
// granted_segment() checks the number of the keys.
bool has_payload(Opcode opcode) {
  return opcode == Opcode::kStats || opcode == Opcode::kAlloc || opcode == Opcode::kAttach;
}

}  // namespace

uint64_t ReplyAssembly::expect(transport::TransportRequest& request) {
  asked_.emplace(++last_id_, &request);
  return last_id_;
}

transport::TransportRequest* ReplyAssembly::take(std::span<const std::byte> message) {
  message = verified(message);
  if (partial_.empty() && is_whole(message)) return &answer(message);
  partial_.insert(partial_.end(), message.begin(), message.end());
  if (!is_whole(partial_)) return nullptr;
  return &answer(std::exchange(partial_, {}));
}

std::span<const std::byte> ReplyAssembly::verified(std::span<const std::byte> message) {
  if (!authenticator_) return message;
  try {
    return authenticator_->verify(message);
  } catch (const protocol::Forged& forged) {
    throw transport::Broken(forged.what());
  }
}

bool ReplyAssembly::is_whole(std::span<const std::byte> frame) const {
  const protocol::Header header = header_of(frame);
  const char* cause = malformed(header);
  if (cause == nullptr && frame.size() > frame_bytes(header))
    cause = "it is longer than its header says";
  if (cause == nullptr) return frame.size() == frame_bytes(header);
  throw transport::Broken(std::string("the memory box sent an invalid reply: ") + cause);
}

const char* ReplyAssembly::malformed(const protocol::Header& header) const {
  if (const char* cause = malformed_reply(header)) return cause;
  const auto asked = asked_.find(header.id);
  if (asked == asked_.end()) return "it replies to no request";
  if (asked->second->opcode != header.opcode) return "it has another opcode than its request";
  if (header.status != Status::kOk) return nullptr;
  if (header.body_bytes != protocol::reply_body_bytes(header.opcode))
    return "its body has another size";
  return header.payload_bytes == 0 || has_payload(header.opcode) ? nullptr : "it has a payload";
}

transport::TransportRequest& ReplyAssembly::answer(std::span<const std::byte> frame) {
  const protocol::Header header = header_of(frame);
  const auto asked = asked_.find(header.id);
  transport::TransportRequest& request = *asked->second;
  asked_.erase(asked);
  const auto body = frame.subspan(sizeof(header), header.body_bytes);
  const auto payload = frame.subspan(sizeof(header) + header.body_bytes);
  request.status = header.status;
  request.reply.assign(body.begin(), body.end());
  if (header.status == Status::kOk) {
    request.payload.assign(payload.begin(), payload.end());
  } else {
    request.cause.assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  }
  return request;
}

}  // namespace hbm::box::verbs::client
