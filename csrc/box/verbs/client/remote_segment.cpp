#include "box/verbs/client/remote_segment.h"

#include <cstring>

namespace hbm::verbs {

RemoteSegment granted_segment(const transport::TransportRequest& request, size_t lanes) {
  if (request.reply.size() != sizeof(smb::Allocated) ||
      request.payload.size() != lanes * sizeof(uint32_t)) {
    throw transport::Broken("the memory box granted a segment without its keys");
  }
  const auto allocated = smb::read_as<smb::Allocated>(request.reply);
  RemoteSegment segment{allocated.address, allocated.size, std::vector<uint32_t>(lanes)};
  std::memcpy(segment.rkeys.data(), request.payload.data(), request.payload.size());
  return segment;
}

}  // namespace hbm::verbs
