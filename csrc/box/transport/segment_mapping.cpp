#include "box/transport/segment_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::transport {
namespace {

std::string because(int failure) { return std::string(": ") + std::strerror(failure); }

}  // namespace

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

}  // namespace hbm::transport
