// A libFuzzer target: a client that sends arbitrary bytes to a stream connection.
//
// The first byte of the input selects the mode. Bit 0: the client sends a proper Join first. Bit 1:
// the box has a token. With both bits, the client sends records with right tags. The other bits are
// a number n. The client sends chunks of 2^n - 1 bytes; if n is 0, each chunk is as large as a
// record may be. The box must reply with proper frames.
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

// Keeps the box's Hello, and fails on a reply that no box may send.
class Replies final : public box::protocol::FrameReceiver {
 public:
  const char* check(const box::protocol::Header& header) override {
    if (const char* cause = box::protocol::malformed_reply(header)) fail(cause);
    return nullptr;
  }
  std::byte* payload_destination(const box::protocol::Header&,
                                 std::span<const std::byte>) override {
    return nullptr;
  }
  void frame(const box::protocol::Header& header, std::span<const std::byte> body,
             Descriptor) override {
    if (header.opcode == box::protocol::Opcode::kHello && body.size() == sizeof(hello)) {
      std::memcpy(&hello, body.data(), sizeof(hello));
    }
  }

  box::protocol::Hello hello{};
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
    connection_ = std::make_shared<box::server::listener::StreamConnection>(
        context_, loop_, Descriptor(ends[1]), box::protocol::TransportKind::kTcp);
  }

  ~Conversation() { connection_->gone(); }

  // Returns false if the box has closed the connection.
  bool send(std::span<const uint8_t> bytes) {
    if (!authenticator_) return send_plain(bytes);
    const box::protocol::RecordHeader header{static_cast<uint32_t>(bytes.size())};
    std::vector<uint8_t> record(sizeof(header) + bytes.size());
    std::memcpy(record.data(), &header, sizeof(header));
    std::copy(bytes.begin(), bytes.end(), record.begin() + sizeof(header));
    const box::protocol::Tag tag = authenticator_->next_tag(std::as_bytes(std::span(record)));
    const auto* const first = reinterpret_cast<const uint8_t*>(tag.data());
    record.insert(record.end(), first, first + tag.size());
    return send_plain(record);
  }

  bool join() {
    client_->receive(replies_, UINT64_MAX);
    struct {
      box::protocol::Header header;
      box::protocol::Join join;
    } frame{};
    frame.header.opcode = box::protocol::Opcode::kJoin;
    frame.header.body_bytes = sizeof(frame.join);
    if (replies_.hello.authenticated != 0) frame.join.flags = box::protocol::Join::kAuthenticated;
    frame.join.proof = box::protocol::client_proof(token_, replies_.hello, frame.join);
    if (!send_plain({reinterpret_cast<const uint8_t*>(&frame), sizeof(frame)})) return false;
    if (replies_.hello.authenticated == 0) return true;
    const box::protocol::MacKeys keys = box::protocol::mac_keys(token_, replies_.hello, frame.join);
    client_->authenticate(keys.to_box, keys.to_client);
    authenticator_.emplace(keys.to_box);
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
      if (next == box::server::listener::EventLoop::Next::kGone) return false;
      if (next == box::server::listener::EventLoop::Next::kWait) return true;
    }
  }

  box::FakeHandler handler_{uint64_t{1} << 16};
  box::server::listener::StreamContext context_;
  box::server::listener::EventLoop loop_{
      "fuzz", nullptr};  // not started: this thread serves the connection
  std::optional<box::protocol::FrameStream> client_;
  std::shared_ptr<box::server::listener::StreamConnection> connection_;
  Replies replies_;
  const std::string token_;
  std::optional<box::protocol::Authenticator> authenticator_;
};

}  // namespace
}  // namespace hbm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t how = data[0];
  std::span<const uint8_t> input(data + 1, size - 1);
  hbm::Conversation conversation((how & 2) != 0 ? "token" : "");
  if ((how & 1) != 0 && !conversation.join()) return 0;
  const size_t most = std::min<size_t>(input.size(), hbm::box::protocol::kMostRecordBytes);
  const size_t chunk = how < 4 ? most : (size_t{1} << std::min(how >> 2, 18)) - 1;
  while (!input.empty()) {
    const auto part = input.first(std::min(chunk, input.size()));
    if (!conversation.send(part)) break;
    input = input.subspan(part.size());
  }
  return 0;
}
