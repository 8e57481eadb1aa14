// A segment of the box that this client has attached, as its one-sided transfers name it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::verbs {

struct RemoteSegment {
  uint64_t address = 0;
  uint64_t size = 0;
  std::vector<uint32_t> rkeys;  // by lane

  bool contains(const smb::Transfer& transfer) const noexcept {
    return transfer.offset <= size && transfer.bytes <= size - transfer.offset;
  }
};

// Reads it from the reply to a kAlloc or kAttach. Throws transport::Broken unless there is one key
// for each lane.
RemoteSegment granted_segment(const transport::TransportRequest& request, size_t lanes);

}  // namespace hbm::verbs
