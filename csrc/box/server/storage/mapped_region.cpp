#include "box/server/storage/mapped_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/descriptor.h"
#include "base/error.h"
#include "box/server/storage/files.h"

namespace hbm::box {
namespace {

std::byte* map(int fd, uint64_t bytes, const std::string& what) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base != MAP_FAILED) return static_cast<std::byte*>(base);
  const char* cause = std::strerror(errno);
  throw Error(ErrorKind::kExhausted,
              "cannot map " + std::to_string(bytes) + " bytes of " + what + ": " + cause);
}

}  // namespace

MappedRegion MappedRegion::in_memory(uint64_t bytes) { return {map(-1, bytes, "memory"), bytes}; }

MappedRegion MappedRegion::create(const std::string& path, uint64_t bytes) {
  const Descriptor file = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  reserve_file(file.get(), bytes, path);
  return {map(file.get(), bytes, path), bytes};
}

MappedRegion MappedRegion::open(const std::string& path) {
  const Descriptor file = open_file(path, O_RDWR);
  const uint64_t bytes = file_bytes(file.get(), path);
  if (bytes == 0) throw Error(ErrorKind::kUnavailable, path + " is damaged: it is empty");
  return {map(file.get(), bytes, path), bytes};
}

MappedRegion::~MappedRegion() {
  if (base_ != nullptr) munmap(base_, size_);
}

void persist(const void* at, uint64_t bytes) {
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(at) + bytes;
  if (msync(reinterpret_cast<void*>(first), last - first, MS_SYNC) == 0) return;
  const char* cause = std::strerror(errno);
  throw Error(ErrorKind::kUnavailable, std::string("the disk of the store failed: ") + cause);
}

}  // namespace hbm::box
