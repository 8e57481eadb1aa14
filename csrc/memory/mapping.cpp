#include "memory/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::memory {

std::shared_ptr<Mapping> Mapping::map(int fd) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode) || file.st_size <= 0) {
    throw Error(ErrorKind::kInvalid,
                "cannot map descriptor " + std::to_string(fd) + ": it is no file with bytes in it");
  }
  const size_t size = static_cast<size_t>(file.st_size);
  std::shared_ptr<Mapping> mapping(new Mapping);
  void* const base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    const bool space = errno == ENOMEM;
    throw Error(space ? ErrorKind::kExhausted : ErrorKind::kUnavailable,
                "cannot map " + std::to_string(size) +
                    " bytes of a peer's segment: " + std::strerror(errno) +
                    (space ? "; raise the limit of address space (ulimit -v)" : ""));
  }
  mapping->base_ = static_cast<std::byte*>(base);
  mapping->size_ = size;
  if (madvise(base, size, MADV_DONTFORK) != 0) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string("cannot keep a peer's segment from forked children: ") + std::strerror(errno));
  }
  return mapping;
}

Mapping::~Mapping() {
  // In a child something else may lie at this address by now.
  if (base_ != nullptr && !fork_.in_child()) munmap(base_, size_);
}

}  // namespace hbm::memory
