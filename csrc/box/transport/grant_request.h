// What a kAlloc or kAttach asks for, read back from its body.
#pragma once

#include <cstdint>
#include <cstring>

#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::transport {

struct GrantRequest {
  uint32_t handle = 0;
  uint32_t flags = 0;  // of smb::Alloc
};

// REQUIRES: `work` is one of the two, with a body of its size.
inline GrantRequest grant_request(const TransportRequest& work) noexcept {
  if (work.opcode == smb::Opcode::kAlloc) {
    smb::Alloc alloc;
    std::memcpy(&alloc, work.body.data(), sizeof(alloc));
    return {alloc.handle, alloc.flags};
  }
  smb::Attach attach;
  std::memcpy(&attach, work.body.data(), sizeof(attach));
  return {attach.handle, attach.flags};
}

}  // namespace hbm::transport
