#include "box/client/core.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"

namespace hbm::client {
namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365 * 100);

// Limits a time to kForever, so that now plus it is still a point in time.
std::chrono::milliseconds bounded(const char* name, std::chrono::milliseconds time) {
  if (time.count() >= 0) return std::min(time, kForever);
  throw Error(ErrorKind::kInvalid,
              std::string(name) + " is not negative: " + std::to_string(time.count()) + " ms");
}

ClientOptions bounded(ClientOptions options) {
  options.connect_timeout = bounded("connect_timeout", options.connect_timeout);
  options.reconnect_timeout = bounded("reconnect_timeout", options.reconnect_timeout);
  options.timeout = bounded("timeout", options.timeout);
  return options;
}

}  // namespace

Core::Core(const ClientOptions& given)
    : options(bounded(given)),
      dialer(options),
      table(options.timeout, dialer.box()),
      driver(options.while_waiting, table),
      reconnector_(options, dialer, table, driver) {}

std::shared_ptr<std::byte> Core::memory(const Attachment& attachment) {
  driver.require_parent();
  const auto lock = table.lock();
  const std::string asked = "view of segment " + key_text(attachment.key);
  if (table.closing()) throw BoxError(BoxError::Cause::kClosed, asked + ": the client was closed");
  if (attachment.state == AttachmentState::kFreed) {
    throw Error(ErrorKind::kInvalid, asked + ": it was freed");
  }
  if (attachment.state == AttachmentState::kLost) {
    throw BoxError(BoxError::Cause::kLost, asked + ": " + attachment.why);
  }
  if (attachment.grant->memory == nullptr) {
    throw Error(ErrorKind::kUnsupported,
                asked + ": only the transport shm has the segment's memory in this process, and " +
                    "this is " + transport_name(dialer.transport()) + "; read() copies it");
  }
  return {attachment.grant, attachment.grant->memory};
}

void Core::close(std::chrono::milliseconds patience) {
  driver.require_parent();
  const auto until = Clock::now() + bounded("patience", patience);
  const std::scoped_lock one(closer_);
  std::exception_ptr interrupt;
  {
    auto lock = table.lock();
    if (table.closing()) return;
    interrupt = table.close(lock, until, options.while_waiting);
    table.stop();
    driver.wake();  // whoever drives, which may be the reconnector
  }
  reconnector_.stop();

  bool up = false;
  {
    const auto lock = table.lock();
    up = table.status().close();
    driver.wake();
  }
  const Driver::Hold held = driver.hold();
  std::unique_ptr<transport::Transport> last = driver.take_transport();
  if (up) leave(std::move(last), dialer.box());
  last.reset();
  {
    const auto lock = table.lock();
    driver.fail_all(BoxError::Cause::kClosed, "the client was closed");
  }
  if (interrupt) std::rethrow_exception(interrupt);
}

bool Core::closed() const {
  const auto lock = table.lock();
  return table.closing();
}

}  // namespace hbm::client
