// A libFuzzer target: a client that sends a stream connection whatever it likes.
//
// The first byte of the input says how: bit 0, after a proper Join; bit 1, to a box with a token;
// the others, in pieces of 2^n - 1 bytes (0: in one). What the box sends must be proper frames.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/server/listener/stream_connection.h"
#include "smb_fake_handler.h"

namespace hbm {
namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Takes replies, and fails on one that no box may send.
class Replies final : public smb::FrameReceiver {
 public:
  const char* check(const smb::Header& header) override {
    if (const char* cause = smb::malformed_reply(header)) fail(cause);
    if (header.status != smb::Status::kOk && header.body_bytes != 0) fail("a refusal has a body");
    return nullptr;
  }
  std::byte* place(const smb::Header&, std::span<const std::byte>) override { return nullptr; }
  void frame(const smb::Header&, std::span<const std::byte>, Descriptor) override {}
};

class Conversation {
 public:
  explicit Conversation(const char* token)
      : context_{handler_,
                 {token, "boot", "/socket", 0},
                 1 << 20,
                 {8, std::chrono::seconds(5)},
                 {0, std::chrono::seconds(1)}} {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) fail("no socket");
    client_.emplace(Descriptor(ends[0]));
    connection_ = std::make_shared<box::StreamConnection>(context_, loop_, Descriptor(ends[1]),
                                                          smb::TransportKind::kTcp);
  }

  ~Conversation() { connection_->gone(); }

  // False: the box has closed the connection.
  bool send(std::span<const uint8_t> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(client_->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
      if (sent < 0 && errno != EAGAIN) return false;
      if (!serve()) return false;
    }
    return true;
  }

  bool join() {
    struct {
      smb::Header header;
      smb::Join join;
    } frame{};
    frame.header.opcode = smb::Opcode::kJoin;
    frame.header.body_bytes = sizeof(frame.join);
    return send({reinterpret_cast<const uint8_t*>(&frame), sizeof(frame)});
  }

 private:
  bool serve() {
    for (;;) {
      const auto next = connection_->serve(0);
      client_->receive(replies_, UINT64_MAX);
      if (next == box::EventLoop::Next::kGone) return false;
      if (next == box::EventLoop::Next::kWait) return true;
    }
  }

  box::FakeHandler handler_{uint64_t{1} << 16};
  box::StreamContext context_;
  box::EventLoop loop_{"fuzz", nullptr};  // is not started: what is served is served here
  std::optional<smb::FrameStream> client_;
  std::shared_ptr<box::StreamConnection> connection_;
  Replies replies_;
};

}  // namespace
}  // namespace hbm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t how = data[0];
  std::span<const uint8_t> input(data + 1, size - 1);
  hbm::Conversation conversation((how & 2) != 0 ? "token" : "");
  if ((how & 1) != 0 && (how & 2) == 0 && !conversation.join()) return 0;
  const size_t piece = how < 4 ? input.size() : (size_t{1} << std::min(how >> 2, 20)) - 1;
  while (!input.empty()) {
    const auto part = input.first(std::min(piece, input.size()));
    if (!conversation.send(part)) break;
    input = input.subspan(part.size());
  }
  return 0;
}
