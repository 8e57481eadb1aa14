// An attached segment of the box, as one-sided transfers address it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::box::verbs::client {

struct RemoteSegment {
  uint64_t address = 0;
  uint64_t size = 0;
  std::vector<uint32_t> rkeys;  // by queue pair

  bool contains(const protocol::Transfer& transfer) const noexcept {
    return transfer.offset <= size && transfer.bytes <= size - transfer.offset;
  }
};

// Returns the segment from the reply to a kAlloc or kAttach. Throws transport::Broken unless there
// is one key for each queue pair.
RemoteSegment granted_segment(const transport::TransportRequest& request, size_t queue_pairs);

}  // namespace hbm::box::verbs::client
