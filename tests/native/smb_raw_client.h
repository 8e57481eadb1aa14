// A client of a stream listener that may also break the rules: it sends frames, or bytes, one by
// one.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "box/protocol/frame_stream.h"
#include "box/protocol/proof.h"
#include "box/protocol/seal.h"
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

inline std::vector<std::byte> sealed_piece(Seal& seal, std::span<const std::byte> bytes) {
  const PieceHeader header{static_cast<uint32_t>(bytes.size())};
  std::vector<std::byte> piece(sizeof(header) + bytes.size());
  std::memcpy(piece.data(), &header, sizeof(header));
  std::copy(bytes.begin(), bytes.end(), piece.begin() + sizeof(header));
  const Tag tag = seal.next(piece);
  piece.insert(piece.end(), tag.begin(), tag.end());
  return piece;
}

inline Deadline soon(std::chrono::milliseconds most = std::chrono::seconds(60)) {
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

  // Any bytes, in sealed pieces if the connection is sealed; no frame was sent since the join.
  void send_bytes(std::span<const std::byte> bytes) {
    if (!seal_) return send_plain(bytes);
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min<size_t>(bytes.size(), kMostPieceBytes));
      send_plain(sealed_piece(*seal_, part));
      bytes = bytes.subspan(part.size());
    }
  }

  void send_plain(std::span<const std::byte> bytes) {
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

  static Join join_for(const Hello& hello, const std::string& token, Id session = {},
                       uint32_t flags = 0) {
    Join join{};
    join.nonce = random_nonce();
    join.session = session;
    join.flags = flags | (hello.sealed != 0 ? Join::kSealed : 0);
    join.pid = 1;
    join.proof = client_proof(token, hello, join);
    return join;
  }

  // Both ends seal what follows, if the box does.
  Frame join(const std::string& token, Id session = {}, uint32_t flags = 0) {
    const Hello greeting = hello();
    return join_as(greeting, token, join_for(greeting, token, session, flags));
  }

  Frame join_as(const Hello& greeting, const std::string& token, const Join& join) {
    Frame reply = ask(Opcode::kJoin, bytes_of(join));
    if (reply.header.status == Status::kOk && (join.flags & Join::kSealed) != 0) {
      const SealKeys keys = seal_keys(token, greeting, join);
      stream_.seal(keys.to_box, keys.to_client);
      seal_.emplace(keys.to_box);
    }
    return reply;
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
  std::optional<Seal> seal_;  // of send_bytes
  uint64_t last_id_ = 0;
  std::vector<std::byte> payload_;
  std::deque<Frame> frames_;
};

}  // namespace hbm::smb
