#include "box/transport/shm_transport.h"

#include <fcntl.h>

#include <fstream>
#include <string>

#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/grant_request.h"
#include "box/transport/join.h"
#include "box/transport/segment_mapping.h"
#include "box/transport/stream_transport.h"
#include "box/transport/transport.h"

namespace hbm::transport {
namespace {

void map_grant(Grant& grant, const TransportRequest& work, Descriptor descriptor) {
  if (!descriptor) {
    throw Error(ErrorKind::kUnavailable,
                "the memory box sent no descriptor for a segment, or this process has too many "
                "open files (ulimit -n)");
  }
  const int mode = fcntl(descriptor.get(), F_GETFL) & O_ACCMODE;
  const bool read_only = (grant_request(work).flags & smb::Alloc::kReadOnly) != 0;
  const bool writable = mode == O_RDWR && !read_only;
  const auto mapping = std::make_shared<SegmentMapping>(descriptor.get(), grant.size, writable);
  grant.memory = mapping->base();
  grant.holds = mapping;
}

smb::Address unix_address(const std::string& path) {
  smb::Address address;
  address.path = path;
  return address;
}

}  // namespace

OpenedTransport open_shm(const TransportOptions& opening) {
  const smb::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;
  OpenedTransport opened;
  std::vector<std::unique_ptr<smb::FrameStream>> streams;
  streams.push_back(
      std::make_unique<smb::FrameStream>(smb::connect_to(unix_address(opening.path), deadline)));
  opened.joined = join_box(*streams.front(), opening.path, opening.join, opening.token, deadline);
  opened.link = std::make_unique<StreamTransport>(
      smb::TransportKind::kShm,
      std::make_unique<Lanes>(std::move(streams), opening.path, map_grant));
  return opened;
}

std::string why_no_shm(const smb::Joined& joined) {
  std::string here;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> here;
  if (here.empty() || here != joined.boot_id) return "the box runs on another machine";
  const std::string path = joined.socket_path;
  if (path.empty()) return "the box has no Unix socket";
  try {
    smb::connect_to(unix_address(path), std::chrono::steady_clock::now());
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace hbm::transport
