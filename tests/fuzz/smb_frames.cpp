// A libFuzzer target: a client that sends a stream connection whatever it likes.
//
// The first byte of the input says how: bit 0, after a proper Join; bit 1, to a box with a token,
// both: sealed, with the right tags; the others, in pieces of 2^n - 1 bytes (0: in one). What the
// box sends must be proper frames.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/protocol/proof.h"
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
    return nullptr;
  }
  std::byte* place(const smb::Header&, std::span<const std::byte>) override { return nullptr; }
  void frame(const smb::Header& header, std::span<const std::byte> body, Descriptor) override {
    if (header.opcode == smb::Opcode::kHello && body.size() == sizeof(hello)) {
      std::memcpy(&hello, body.data(), sizeof(hello));
    }
  }

  smb::Hello hello{};
};

class Conversation {
 public:
  explicit Conversation(const char* token)
      : context_{handler_,
                 {token, "boot", "/socket", 0, true},
                 1 << 20,
                 {8, std::chrono::seconds(5)},
                 {0, std::chrono::seconds(1)}},
        token_(token) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) fail("no socket");
    client_.emplace(Descriptor(ends[0]));
    connection_ = std::make_shared<box::StreamConnection>(context_, loop_, Descriptor(ends[1]),
                                                          smb::TransportKind::kTcp);
  }

  ~Conversation() { connection_->gone(); }

  // False: the box has closed the connection.
  bool send(std::span<const uint8_t> bytes) {
    if (!seal_) return send_plain(bytes);
    const smb::PieceHeader header{static_cast<uint32_t>(bytes.size())};
    std::vector<uint8_t> piece(sizeof(header) + bytes.size());
    std::memcpy(piece.data(), &header, sizeof(header));
    std::copy(bytes.begin(), bytes.end(), piece.begin() + sizeof(header));
    const smb::Tag tag = seal_->next(std::as_bytes(std::span(piece)));
    const auto* const first = reinterpret_cast<const uint8_t*>(tag.data());
    piece.insert(piece.end(), first, first + tag.size());
    return send_plain(piece);
  }

  bool join() {
    client_->receive(replies_, UINT64_MAX);
    struct {
      smb::Header header;
      smb::Join join;
    } frame{};
    frame.header.opcode = smb::Opcode::kJoin;
    frame.header.body_bytes = sizeof(frame.join);
    if (replies_.hello.sealed != 0) frame.join.flags = smb::Join::kSealed;
    frame.join.proof = smb::client_proof(token_, replies_.hello, frame.join);
    if (!send_plain({reinterpret_cast<const uint8_t*>(&frame), sizeof(frame)})) return false;
    if (replies_.hello.sealed == 0) return true;
    const smb::SealKeys keys = smb::seal_keys(token_, replies_.hello, frame.join);
    client_->seal(keys.to_box, keys.to_client);
    seal_.emplace(keys.to_box);
    return true;
  }

 private:
  bool send_plain(std::span<const uint8_t> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(client_->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
      if (sent < 0 && errno != EAGAIN) return false;
      if (!serve()) return false;
    }
    return true;
  }

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
  const std::string token_;
  std::optional<smb::Seal> seal_;
};

}  // namespace
}  // namespace hbm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t how = data[0];
  std::span<const uint8_t> input(data + 1, size - 1);
  hbm::Conversation conversation((how & 2) != 0 ? "token" : "");
  if ((how & 1) != 0 && !conversation.join()) return 0;
  const size_t most = std::min<size_t>(input.size(), hbm::smb::kMostPieceBytes);
  const size_t piece = how < 4 ? most : (size_t{1} << std::min(how >> 2, 18)) - 1;
  while (!input.empty()) {
    const auto part = input.first(std::min(piece, input.size()));
    if (!conversation.send(part)) break;
    input = input.subspan(part.size());
  }
  return 0;
}
