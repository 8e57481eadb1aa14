// open_shm(): one connection to the box's Unix socket, by which the segments' descriptors come, and
// the segments mapped here.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/fork.h"
#include "box/protocol/address.h"
#include "box/protocol/socket.h"
#include "box/transport/join.h"
#include "box/transport/stream_transport.h"
#include "box/transport/transport.h"

namespace hbm::transport {
namespace {

std::string because(int failure) { return std::string(": ") + std::strerror(failure); }

// A segment of a box on the same machine, mapped here.
//
// A forked child does not inherit it: a stray access there faults instead of changing the box's
// memory. An inherited object may be destroyed there, without effect, and not otherwise used.
//
// Threads: every member may be called from any thread.
class SegmentMapping {
 public:
  // The first `bytes` bytes behind `descriptor`, which stays the caller's and may be closed at
  // once.
  // Throws Error(kInvalid) when it has fewer, Error(kExhausted) when address space is short,
  // Error(kUnavailable) when the kernel refuses for another reason.
  SegmentMapping(int descriptor, uint64_t bytes, bool writable);
  ~SegmentMapping();
  SegmentMapping(const SegmentMapping&) = delete;
  SegmentMapping& operator=(const SegmentMapping&) = delete;

  std::byte* base() const noexcept { return base_; }

 private:
  const ForkGuard fork_;
  const size_t bytes_;
  std::byte* base_ = nullptr;
};

SegmentMapping::SegmentMapping(int descriptor, uint64_t bytes, bool writable) : bytes_(bytes) {
  struct stat file{};
  if (fstat(descriptor, &file) != 0 || static_cast<uint64_t>(file.st_size) < bytes) {
    throw Error(ErrorKind::kInvalid, "the memory box gave a file of " +
                                         std::to_string(file.st_size) + " bytes for a segment of " +
                                         std::to_string(bytes));
  }
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const base = mmap(nullptr, bytes_, protection, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    const int failure = errno;
    throw Error(failure == ENOMEM ? ErrorKind::kExhausted : ErrorKind::kUnavailable,
                "cannot map a segment of " + std::to_string(bytes) + " bytes of a memory box" +
                    because(failure) +
                    (failure == ENOMEM ? "; raise the limit of address space (ulimit -v)" : ""));
  }
  if (madvise(base, bytes_, MADV_DONTFORK) != 0) {
    const int failure = errno;
    munmap(base, bytes_);
    throw Error(ErrorKind::kUnavailable,
                "cannot keep a memory box's segment from forked children" + because(failure));
  }
  base_ = static_cast<std::byte*>(base);
}

SegmentMapping::~SegmentMapping() {
  // In a child something else may lie at this address by now.
  if (!fork_.in_child()) munmap(base_, bytes_);
}

void map_grant(Grant& grant, const TransportRequest& request, Descriptor descriptor) {
  if (!descriptor) {
    throw Error(ErrorKind::kUnavailable,
                "the memory box sent no descriptor for a segment, or this process has too many "
                "open files (ulimit -n)");
  }
  const int mode = fcntl(descriptor.get(), F_GETFL) & O_ACCMODE;
  const bool read_only = (grant_request(request).flags & smb::Alloc::kReadOnly) != 0;
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
  opened.transport = std::make_unique<StreamTransport>(smb::TransportKind::kShm, std::move(streams),
                                                       opening.path, map_grant);
  return opened;
}

std::string why_no_shm(const smb::Joined& joined) {
  const std::string here = boot_id();
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
