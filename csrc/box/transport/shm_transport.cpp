// Implements open_shm(): opens one connection to the box's Unix socket. Over this connection the
// box passes the descriptors of attached segments, and the client maps them.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/shared_mapping.h"
#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"
#include "box/transport/stream_transport.h"
#include "box/transport/transport.h"

namespace hbm::box::transport {
namespace {

void map_grant(Grant& grant, const TransportRequest& request, Descriptor descriptor) {
  if (!descriptor) {
    throw Error(ErrorKind::kUnavailable,
                "the memory box sent no descriptor for a segment, or this process has too many "
                "open files (ulimit -n)");
  }
  const int mode = fcntl(descriptor.get(), F_GETFL) & O_ACCMODE;
  const bool read_only = (grant_request(request).flags & protocol::Alloc::kReadOnly) != 0;
  const bool writable = mode == O_RDWR && !read_only;
  struct stat file{};
  if (fstat(descriptor.get(), &file) != 0 || static_cast<uint64_t>(file.st_size) < grant.size) {
    throw Error(ErrorKind::kInvalid, "the memory box gave a file of " +
                                         std::to_string(file.st_size) + " bytes for a segment of " +
                                         std::to_string(grant.size));
  }
  const auto mapping = std::make_shared<SharedMapping>(descriptor.get(), grant.size, writable,
                                                       "a memory box's segment");
  grant.memory = mapping->base();
  grant.holds = mapping;
}

protocol::Address unix_address(const std::string& path) {
  protocol::Address address;
  address.path = path;
  return address;
}

// Rejects a Unix socket of another user, who could forward the traffic to the box and change it. A
// process of the same user or of root could do the same, and is trusted.
void require_own_user(const std::string& path, std::optional<uid_t> user) {
  if (user && (*user == geteuid() || *user == 0)) return;
  throw Error(
      ErrorKind::kUnavailable,
      "the Unix socket " + path + " is served by " +
          (user ? "user " + std::to_string(*user) : "a user that the kernel does not name") +
          ", and shm is for a box of this process's own user (" + std::to_string(geteuid()) +
          ") or root's; use the transport tcp");
}

Descriptor call_box(const std::string& path, protocol::Deadline deadline) {
  Descriptor called = protocol::connect_to(unix_address(path), deadline);
  require_own_user(path, protocol::peer_user(called.get()));
  return called;
}

}  // namespace

OpenedTransport open_shm(const TransportOptions& opening) {
  const protocol::Deadline deadline = std::chrono::steady_clock::now() + opening.timeout;
  OpenedTransport opened;
  std::vector<std::unique_ptr<protocol::FrameStream>> streams;
  streams.push_back(std::make_unique<protocol::FrameStream>(call_box(opening.path, deadline)));
  opened.joined = join_box(*streams.front(), opening.path, opening.join, opening.token, deadline);
  opened.transport = std::make_unique<StreamTransport>(protocol::TransportKind::kShm,
                                                       std::move(streams), opening.path, map_grant);
  return opened;
}

std::string why_no_shm(const protocol::Joined& joined) {
  const std::string here = boot_id();
  if (here.empty() || here != joined.boot_id) return "the box runs on another machine";
  const std::string path = joined.socket_path;
  if (path.empty()) return "the box has no Unix socket";
  try {
    call_box(path, std::chrono::steady_clock::now());
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace hbm::box::transport
