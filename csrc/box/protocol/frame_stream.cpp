#include "box/protocol/frame_stream.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace hbm::box::protocol {
namespace {

bool is_unix(int socket) {
  int domain = 0;
  socklen_t length = sizeof(domain);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) {
    throw Error(ErrorKind::kInvalid,
                std::string("a FrameStream needs a socket: ") + std::strerror(errno));
  }
  return domain == AF_UNIX;
}

}  // namespace

FrameStream::FrameStream(Descriptor socket, Payloads payloads)
    : socket_(std::move(socket)), output_(payloads), input_(is_unix(socket_.get()), payloads) {
  const int flags = fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(ErrorKind::kNetwork,
                std::string("cannot make a socket non-blocking: ") + std::strerror(errno));
  }
}

void FrameStream::queue(Header header, std::span<const std::byte> body,
                        std::span<const std::byte> payload, std::shared_ptr<const void> hold,
                        Descriptor descriptor) {
  output_.queue(header, body, payload, std::move(hold), std::move(descriptor));
}

void FrameStream::authenticate(const MacKey& sending, const MacKey& receiving) {
  if (output_.bytes() > 0) {
    throw Error(ErrorKind::kNetwork, "the other end does not receive the reply to its join");
  }
  output_.authenticate(sending);
  input_.authenticate(receiving);
}

FrameStream::Flow FrameStream::flush() {
  switch (output_.flush(fd())) {
    case FrameOutput::Flushed::kSent:
      return Flow::kIdle;
    case FrameOutput::Flushed::kBlocked:
      return Flow::kBlocked;
    case FrameOutput::Flushed::kClosed:
      break;
  }
  return Flow::kClosed;
}

FrameStream::Flow FrameStream::receive(Receiver& receiver, uint64_t most) {
  paused_ = false;
  switch (input_.receive(fd(), receiver, most, paused_)) {
    case FrameInput::Received::kIdle:
      return Flow::kIdle;
    case FrameInput::Received::kMore:
      return Flow::kMore;
    case FrameInput::Received::kClosed:
      break;
  }
  return Flow::kClosed;
}

}  // namespace hbm::box::protocol
