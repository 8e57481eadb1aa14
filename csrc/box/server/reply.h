// Replies, as the requests make them.
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"

namespace hbm::box {

template <smb::Body T>
Reply with_body(const T& value) {
  Reply reply;
  reply.body.resize(sizeof value);
  std::memcpy(reply.body.data(), &value, sizeof value);
  return reply;
}

inline Reply refused(smb::Status status, std::string cause) {
  Reply reply;
  reply.status = status;
  reply.cause = std::move(cause);
  return reply;
}

}  // namespace hbm::box
