#include "box/protocol/wake_event.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::box::protocol {

WakeEvent::WakeEvent() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_) return;
  throw Error(ErrorKind::kUnavailable,
              std::string("cannot make an eventfd for a connection to a memory box: ") +
                  std::strerror(errno) + "; raise the limit of open files (ulimit -n)");
}

void WakeEvent::signal() noexcept {
  const uint64_t once = 1;
  // Fails only if 2^64 signals come without a clear().
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &once, sizeof(once));
}

void WakeEvent::clear() noexcept {
  uint64_t signals = 0;
  // Fails only if there was no signal.
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &signals, sizeof(signals));
}

}  // namespace hbm::box::protocol
