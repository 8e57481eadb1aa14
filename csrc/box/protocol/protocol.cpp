#include "box/protocol/protocol.h"

#include <iterator>

namespace hbm::box::protocol {
namespace {

const char* malformed(const Header& header) noexcept {
  if (header.magic != kMagic) return "it does not start with SMB1";
  if (header.version != kVersion) return "it is of another version of the protocol";
  const auto opcode = static_cast<uint8_t>(header.opcode);
  if (opcode == 0 || opcode > kLastOpcode) return "its opcode does not exist";
  if (header.body_bytes > kMaxBody) return "its body is too long";
  if (header.payload_bytes > kMaxPayload) return "its payload is too long";
  return nullptr;
}

}  // namespace

int request_body_bytes(Opcode opcode) noexcept {
  switch (opcode) {
    case Opcode::kHello:
      return -1;
    case Opcode::kJoin:
      return sizeof(Join);
    case Opcode::kLeave:
    case Opcode::kPing:
      return 0;
    case Opcode::kAlloc:
      return sizeof(Alloc);
    case Opcode::kAttach:
      return sizeof(Attach);
    case Opcode::kFree:
    case Opcode::kDelete:
      return sizeof(Release);
    case Opcode::kRead:
    case Opcode::kWrite:
      return sizeof(Transfer);
    case Opcode::kAccumulate:
      return sizeof(Accumulate);
    case Opcode::kFetchAdd:
      return sizeof(FetchAdd);
    case Opcode::kStats:
      return sizeof(StatsQuery);
    case Opcode::kExists:
      return sizeof(KeyQuery);
  }
  return -1;
}

uint32_t reply_body_bytes(Opcode opcode) noexcept {
  switch (opcode) {
    case Opcode::kHello:
      return sizeof(Hello);
    case Opcode::kJoin:
      return sizeof(Joined);
    case Opcode::kAlloc:
    case Opcode::kAttach:
      return sizeof(Allocated);
    case Opcode::kFetchAdd:
      return sizeof(Fetched);
    case Opcode::kExists:
      return sizeof(KeyFound);
    default:
      return 0;
  }
}

const char* malformed_request(const Header& header) noexcept {
  if (const char* cause = malformed(header)) return cause;
  if (header.status != Status::kOk) return "a request has no status";
  const int body = request_body_bytes(header.opcode);
  if (body < 0) return "its opcode is no request";
  if (header.body_bytes != static_cast<uint32_t>(body)) return "its body has another size";
  if (header.payload_bytes != 0 && header.opcode != Opcode::kWrite) return "it has a payload";
  return nullptr;
}

const char* malformed_reply(const Header& header) noexcept {
  if (const char* cause = malformed(header)) return cause;
  if (header.status > Status::kInternal) return "its status does not exist";
  if (header.status == Status::kOk) return nullptr;
  if (header.body_bytes != 0) return "an error has no body";
  return header.payload_bytes > kMaxCause ? "its cause is too long" : nullptr;
}

std::string_view whole_characters(std::string_view text, size_t most) noexcept {
  if (text.size() <= most) return text;
  constexpr size_t kLongest = 4;  // bytes of a character
  const auto continues = [&](size_t at) { return (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80; };
  for (size_t lost = 0; lost < kLongest && lost <= most; ++lost) {
    if (!continues(most - lost)) return text.substr(0, most - lost);
  }
  return text.substr(0, most);  // not UTF-8
}

bool sequenced(Opcode opcode) noexcept {
  return opcode == Opcode::kAlloc || opcode == Opcode::kFree || opcode == Opcode::kDelete ||
         opcode == Opcode::kAccumulate || opcode == Opcode::kFetchAdd;
}

const char* opcode_name(Opcode opcode) noexcept {
  constexpr const char* names[] = {"",      "hello",      "join",      "leave",  "ping",
                                   "alloc", "attach",     "free",      "delete", "read",
                                   "write", "accumulate", "fetch_add", "stats",  "exists"};
  static_assert(std::size(names) == kLastOpcode + 1);
  const auto opcode_number = static_cast<uint8_t>(opcode);
  return opcode_number <= kLastOpcode ? names[opcode_number] : "";
}

const char* status_name(Status status) noexcept {
  constexpr const char* names[] = {"ok",           "malformed",     "denied",      "read-only",
                                   "not attached", "no such key",   "exists",      "size mismatch",
                                   "range",        "exhausted",     "unsupported", "expired",
                                   "closing",      "internal error"};
  static_assert(std::size(names) == static_cast<size_t>(Status::kInternal) + 1);
  const auto number = static_cast<size_t>(status);
  return number < std::size(names) ? names[number] : "";
}

}  // namespace hbm::box::protocol
