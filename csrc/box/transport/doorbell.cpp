#include "box/transport/doorbell.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::transport {

Doorbell::Doorbell() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_) return;
  throw Error(ErrorKind::kUnavailable,
              std::string("cannot make an eventfd for a connection to a memory box: ") +
                  std::strerror(errno) + "; raise the limit of open files (ulimit -n)");
}

void Doorbell::ring() noexcept {
  const uint64_t once = 1;
  // Fails only when it was rung 2^64 times already.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &once, sizeof(once));
}

void Doorbell::clear() noexcept {
  uint64_t rings = 0;
  // Fails only when nobody rang.
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &rings, sizeof(rings));
}

}  // namespace hbm::transport
