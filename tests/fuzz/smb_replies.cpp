// A libFuzzer target: a box that sends arbitrary bytes to a client.
//
// The first byte of the input selects the mode. Bit 0 clear: the client is joining, and the bytes
// replace the box's Hello and its reply to the Join. Bit 0 set: the client has joined, and waits
// for replies with the ids of smb_replies_corpus. Then bits 2 to 7 are a number n: the box sends
// chunks of 2^n - 1 bytes (n = 0: one chunk). The client may only break the connection, and must
// write received bytes only into the memory of its read.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/transport/connection.h"
#include "box/transport/join.h"

namespace hbm::box::transport {
namespace {

constexpr size_t kReadBytes = 300;
constexpr size_t kGuard = 64;  // bytes before and after the memory of the read

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct SocketPair {
  SocketPair() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) fail("no socket");
    client = std::make_unique<protocol::FrameStream>(Descriptor(ends[0]));
    box = Descriptor(ends[1]);
  }

  // Returns false if the client takes no more bytes.
  bool send(std::span<const uint8_t>& bytes) const {
    const ssize_t sent = ::send(box.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
    return sent >= 0 || errno == EAGAIN;
  }

  std::unique_ptr<protocol::FrameStream> client;
  Descriptor box;
};

void join(std::span<const uint8_t> bytes) {
  SocketPair pair;
  static_cast<void>(pair.send(bytes));
  shutdown(pair.box.get(), SHUT_WR);
  try {
    join_box(*pair.client, "the fuzzer", protocol::Join{}, "", std::chrono::steady_clock::now());
  } catch (const Error&) {
  }
}

// A client with requests in flight: one for each form of reply.
class Client final : public Connection::Requester {
 public:
  Client() : memory_(kReadBytes + 2 * kGuard, std::byte{0x5a}) {
    connection_ = std::make_unique<Connection>(std::move(pair_.client), "the fuzzer", *this);
    ask(protocol::Opcode::kAlloc, sizeof(protocol::Alloc));
    ask(protocol::Opcode::kFetchAdd, sizeof(protocol::FetchAdd));
    ask(protocol::Opcode::kStats, sizeof(protocol::StatsQuery));
    ask(protocol::Opcode::kPing, 0);
    Slice slice;
    slice.opcode = protocol::Opcode::kRead;
    slice.transfer.bytes = kReadBytes;
    slice.local = memory_.data() + kGuard;
    connection_->send(slice);
    slice.opcode = protocol::Opcode::kWrite;
    connection_->send(slice);
    ask(protocol::Opcode::kExists, sizeof(protocol::KeyQuery));
    connection_->flush();
  }

  void take(std::span<const uint8_t> bytes, size_t chunk) {
    try {
      while (!bytes.empty()) {
        auto part = bytes.first(std::min(chunk, bytes.size()));
        bytes = bytes.subspan(part.size());
        while (!part.empty()) {
          if (!pair_.send(part)) return;
          while (connection_->receive()) {
          }
        }
      }
    } catch (const Error&) {
    }
    const auto untouched = [](std::byte one) { return one == std::byte{0x5a}; };
    if (!std::all_of(memory_.begin(), memory_.begin() + kGuard, untouched) ||
        !std::all_of(memory_.end() - kGuard, memory_.end(), untouched)) {
      fail("an answer went past the memory that it was asked for");
    }
  }

 private:
  void ask(protocol::Opcode opcode, size_t body_bytes) {
    auto& request = requests_.emplace_back(std::make_unique<TransportRequest>());
    request->opcode = opcode;
    request->body.resize(body_bytes);
    connection_->send(*request);
  }

  void answered(TransportRequest& request, Descriptor) override {
    if (request.done.exchange(true)) fail("a request was answered twice");
    const bool granted =
        request.opcode == protocol::Opcode::kAlloc && request.status == protocol::Status::kOk;
    if (granted && request.reply.size() != sizeof(protocol::Allocated))
      fail("a grant of another size");
  }

  void answered(const Slice&, protocol::Status, const std::string&) override {
    if (++slices_ > 2) fail("a slice was answered twice");
  }

  SocketPair pair_;
  std::vector<std::byte> memory_;
  std::vector<std::unique_ptr<TransportRequest>> requests_;
  std::unique_ptr<Connection> connection_;
  int slices_ = 0;
};

}  // namespace
}  // namespace hbm::box::transport

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t how = data[0];
  const std::span<const uint8_t> input(data + 1, size - 1);
  if ((how & 1) == 0) {
    hbm::box::transport::join(input);
    return 0;
  }
  const size_t chunk =
      how < 4 ? std::max<size_t>(input.size(), 1) : (size_t{1} << std::min(how >> 2, 20)) - 1;
  hbm::box::transport::Client().take(input, chunk);
  return 0;
}
