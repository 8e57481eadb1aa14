// A segment that a client has attached.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::client {

class ClientOperation;

struct Attachment {
  enum class State { kLive, kFreed, kLost };

  const smb::Id key;
  const uint64_t size;
  const uint32_t handle;
  const bool created;
  const bool read_only;
  const bool temporary;

  // Guarded by the core's mutex.
  std::shared_ptr<transport::Grant> grant;  // of the connection that stands, or of the last one
  State state = State::kLive;
  std::string why{};  // it is lost

  // Those that touch the segment, in the order of issue; shared by all attachments to one key.
  std::shared_ptr<std::vector<ClientOperation*>> unfinished{};
};

std::string key_text(smb::Id key);  // 32 hexadecimal digits

}  // namespace hbm::client
