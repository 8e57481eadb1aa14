#include "box/verbs/client/remote_segment.h"

#include <cstring>

namespace hbm::box::verbs::client {

RemoteSegment granted_segment(const transport::TransportRequest& request, size_t queue_pairs) {
  if (request.reply.size() != sizeof(protocol::Allocated) ||
      request.payload.size() != queue_pairs * sizeof(uint32_t)) {
    throw transport::Broken("the memory box granted a segment without its keys");
  }
  const auto allocated = protocol::read_as<protocol::Allocated>(request.reply);
  RemoteSegment segment{allocated.address, allocated.size, std::vector<uint32_t>(queue_pairs)};
  std::memcpy(segment.rkeys.data(), request.payload.data(), request.payload.size());
  return segment;
}

}  // namespace hbm::box::verbs::client
