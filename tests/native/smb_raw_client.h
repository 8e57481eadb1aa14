// A client of a stream listener that may also break the rules: it sends frames, or bytes, one by
// one.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "base/error.h"
#include "box/protocol/frame_stream.h"
#include "box/protocol/proof.h"
#include "box/protocol/socket.h"

namespace hbm::smb {

struct Frame {
  Header header;
  std::vector<std::byte> body;
  std::vector<std::byte> payload;
  Descriptor descriptor;

  std::string text() const {
    return {reinterpret_cast<const char*>(payload.data()), payload.size()};
  }
  template <Body T>
  T as() const {
    T read{};
    EXPECT_EQ(body.size(), sizeof(T));
    if (body.size() == sizeof(T)) std::memcpy(&read, body.data(), sizeof(T));
    return read;
  }
};

template <Body T>
std::span<const std::byte> bytes_of(const T& body) {
  return std::as_bytes(std::span(&body, 1));
}

inline Deadline soon(std::chrono::milliseconds most = std::chrono::seconds(20)) {
  return std::chrono::steady_clock::now() + most;
}

class RawClient final : private FrameReceiver {
 public:
  explicit RawClient(const Address& address) : stream_(connect_to(address, soon())) {}

  FrameStream& stream() { return stream_; }

  void queue(Opcode opcode, std::span<const std::byte> body = {},
             std::span<const std::byte> payload = {}) {
    Header header;
    header.opcode = opcode;
    header.id = ++last_id_;
    stream_.queue(header, body, payload);
  }

  void flush() {
    for (;;) {
      const FrameStream::Flow flow = stream_.flush();
      if (flow == FrameStream::Flow::kIdle) return;
      if (flow == FrameStream::Flow::kClosed || !wait_for(stream_.fd(), POLLOUT, soon())) {
        throw Error(ErrorKind::kNetwork, "the box takes no more");
      }
    }
  }

  void send(Opcode opcode, std::span<const std::byte> body = {},
            std::span<const std::byte> payload = {}) {
    queue(opcode, body, payload);
    flush();
  }

  void send_bytes(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(stream_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes = bytes.subspan(static_cast<size_t>(sent));
      } else if (errno != EAGAIN || !wait_for(stream_.fd(), POLLOUT, soon())) {
        throw Error(ErrorKind::kNetwork, "the box takes no more");
      }
    }
  }

  // The next frame. Throws Error(kNetwork) when the box closes the connection.
  Frame next() {
    const Deadline deadline = soon();
    while (frames_.empty()) {
      if (!wait_for(stream_.fd(), POLLIN, deadline)) {
        throw Error(ErrorKind::kNetwork, "the box sends nothing");
      }
      if (stream_.receive(*this, kMaxPayload) == FrameStream::Flow::kClosed && frames_.empty()) {
        throw Error(ErrorKind::kNetwork, "the box has closed the connection");
      }
    }
    Frame frame = std::move(frames_.front());
    frames_.pop_front();
    return frame;
  }

  Frame ask(Opcode opcode, std::span<const std::byte> body = {},
            std::span<const std::byte> payload = {}) {
    send(opcode, body, payload);
    Frame reply = next();
    EXPECT_EQ(reply.header.id, last_id_);
    EXPECT_EQ(reply.header.opcode, opcode);
    return reply;
  }

  // True once the box has closed; frames that come before are dropped.
  bool closed() {
    try {
      for (;;) next();
    } catch (const Error& error) {
      return std::string(error.what()) == "the box has closed the connection";
    }
  }

  Hello hello() { return next().as<Hello>(); }

  static Join join_for(const Hello& hello, const std::string& token, Id session = {}) {
    Join join{};
    join.nonce = random_nonce();
    join.session = session;
    join.pid = 1;
    join.proof = client_proof(token, hello, join);
    return join;
  }

  Frame join(const std::string& token) {
    return ask(Opcode::kJoin, bytes_of(join_for(hello(), token)));
  }

 private:
  const char* check(const Header& header) override { return malformed_reply(header); }

  std::byte* place(const Header& header, std::span<const std::byte>) override {
    payload_.resize(header.payload_bytes);
    return payload_.data();
  }

  void frame(const Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override {
    frames_.push_back(
        {header, {body.begin(), body.end()}, std::move(payload_), std::move(descriptor)});
    payload_.clear();
  }

  FrameStream stream_;
  uint64_t last_id_ = 0;
  std::vector<std::byte> payload_;
  std::deque<Frame> frames_;
};

}  // namespace hbm::smb
