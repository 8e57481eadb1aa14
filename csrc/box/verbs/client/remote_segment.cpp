#include "box/verbs/client/remote_segment.h"

#include <cstring>

namespace hbm::verbs {

RemoteSegment granted_segment(const transport::TransportRequest& request, size_t lanes) {
  smb::Allocated allocated;
  if (request.reply.size() != sizeof(allocated) ||
      request.payload.size() != lanes * sizeof(uint32_t)) {
    throw transport::Broken("the memory box granted a segment without its keys");
  }
  std::memcpy(&allocated, request.reply.data(), sizeof(allocated));
  RemoteSegment segment{allocated.address, allocated.size, std::vector<uint32_t>(lanes)};
  std::memcpy(segment.rkeys.data(), request.payload.data(), request.payload.size());
  return segment;
}

}  // namespace hbm::verbs
