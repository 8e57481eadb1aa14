#include "base/shared_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace hbm {

SharedMapping::SharedMapping(int descriptor, size_t bytes, bool writable, const std::string& name)
    : size_(bytes) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const base = mmap(nullptr, size_, protection, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    const bool space = errno == ENOMEM;
    throw Error(space ? ErrorKind::kExhausted : ErrorKind::kUnavailable,
                "cannot map " + std::to_string(bytes) + " bytes of " + name + ": " +
                    std::strerror(errno) +
                    (space ? "; raise the limit of address space (ulimit -v)" : ""));
  }
  if (madvise(base, size_, MADV_DONTFORK) != 0) {
    const int failure = errno;
    munmap(base, size_);
    throw Error(ErrorKind::kUnavailable,
                "cannot keep " + name + " from forked children: " + std::strerror(failure));
  }
  base_ = static_cast<std::byte*>(base);
}

SharedMapping::~SharedMapping() {
  // A forked child does not have the mapping, and may have mapped other memory at its addresses.
  if (!fork_.in_child()) munmap(base_, size_);
}

}  // namespace hbm
