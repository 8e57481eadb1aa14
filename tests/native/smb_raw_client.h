// A client of a stream listener that may violate the protocol: it sends single frames, or bytes.
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
#include "box/protocol/authenticator.h"
#include "box/protocol/frame_stream.h"
#include "box/protocol/proof.h"
#include "box/protocol/socket.h"

namespace hbm::box {

struct Frame {
  protocol::Header header;
  std::vector<std::byte> body;
  std::vector<std::byte> payload;
  Descriptor descriptor;

  std::string text() const {
    return {reinterpret_cast<const char*>(payload.data()), payload.size()};
  }
  template <protocol::Body T>
  T as() const {
    T read{};
    EXPECT_EQ(body.size(), sizeof(T));
    if (body.size() == sizeof(T)) std::memcpy(&read, body.data(), sizeof(T));
    return read;
  }
};

template <protocol::Body T>
std::span<const std::byte> bytes_of(const T& body) {
  return std::as_bytes(std::span(&body, 1));
}

inline std::vector<std::byte> tagged_record(protocol::Authenticator& authenticator,
                                            std::span<const std::byte> bytes) {
  const protocol::RecordHeader header{static_cast<uint32_t>(bytes.size())};
  std::vector<std::byte> record(sizeof(header) + bytes.size());
  std::memcpy(record.data(), &header, sizeof(header));
  std::copy(bytes.begin(), bytes.end(), record.begin() + sizeof(header));
  const protocol::Tag tag = authenticator.next_tag(record);
  record.insert(record.end(), tag.begin(), tag.end());
  return record;
}

inline protocol::Deadline soon(std::chrono::milliseconds most = std::chrono::seconds(60)) {
  return std::chrono::steady_clock::now() + most;
}

class RawClient final : private protocol::FrameReceiver {
 public:
  explicit RawClient(const protocol::Address& address)
      : stream_(protocol::connect_to(address, soon())) {}

  protocol::FrameStream& stream() { return stream_; }

  void queue(protocol::Opcode opcode, std::span<const std::byte> body = {},
             std::span<const std::byte> payload = {}) {
    protocol::Header header;
    header.opcode = opcode;
    header.id = ++last_id_;
    stream_.queue(header, body, payload);
  }

  void flush() {
    for (;;) {
      const protocol::FrameStream::Flow flow = stream_.flush();
      if (flow == protocol::FrameStream::Flow::kIdle) return;
      if (flow == protocol::FrameStream::Flow::kClosed ||
          !protocol::wait_for(stream_.fd(), POLLOUT, soon())) {
        throw Error(ErrorKind::kNetwork, "the box takes no more");
      }
    }
  }

  void send(protocol::Opcode opcode, std::span<const std::byte> body = {},
            std::span<const std::byte> payload = {}) {
    queue(opcode, body, payload);
    flush();
  }

  // Sends any bytes, in records if the connection is authenticated. REQUIRES: no frame was sent
  // since the join.
  void send_bytes(std::span<const std::byte> bytes) {
    if (!authenticator_) return send_plain(bytes);
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min<size_t>(bytes.size(), protocol::kMostRecordBytes));
      send_plain(tagged_record(*authenticator_, part));
      bytes = bytes.subspan(part.size());
    }
  }

  void send_plain(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(stream_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes = bytes.subspan(static_cast<size_t>(sent));
      } else if (errno != EAGAIN || !protocol::wait_for(stream_.fd(), POLLOUT, soon())) {
        throw Error(ErrorKind::kNetwork, "the box takes no more");
      }
    }
  }

  // Returns the next frame. Throws Error(kNetwork) when the box closes the connection.
  Frame next() {
    const protocol::Deadline deadline = soon();
    while (frames_.empty()) {
      if (!protocol::wait_for(stream_.fd(), POLLIN, deadline)) {
        throw Error(ErrorKind::kNetwork, "the box sends nothing");
      }
      if (stream_.receive(*this, protocol::kMaxPayload) == protocol::FrameStream::Flow::kClosed &&
          frames_.empty()) {
        throw Error(ErrorKind::kNetwork, "the box has closed the connection");
      }
    }
    Frame frame = std::move(frames_.front());
    frames_.pop_front();
    return frame;
  }

  Frame ask(protocol::Opcode opcode, std::span<const std::byte> body = {},
            std::span<const std::byte> payload = {}) {
    send(opcode, body, payload);
    Frame reply = next();
    EXPECT_EQ(reply.header.id, last_id_);
    EXPECT_EQ(reply.header.opcode, opcode);
    return reply;
  }

  // Drops frames until the box closes the connection, and then returns true. Returns false if that
  // does not happen in time.
  bool closed() {
    try {
      for (;;) next();
    } catch (const Error& error) {
      return std::string(error.what()) == "the box has closed the connection";
    }
  }

  protocol::Hello hello() { return next().as<protocol::Hello>(); }

  static protocol::Join join_for(const protocol::Hello& hello, const std::string& token,
                                 protocol::Id session = {}, uint32_t flags = 0) {
    protocol::Join join{};
    join.nonce = protocol::random_nonce();
    join.session = session;
    join.flags = flags | (hello.authenticated != 0 ? protocol::Join::kAuthenticated : 0);
    join.pid = 1;
    join.proof = protocol::client_proof(token, hello, join);
    return join;
  }

  // Joins, and authenticates the connection if the box authenticates.
  Frame join(const std::string& token, protocol::Id session = {}, uint32_t flags = 0) {
    const protocol::Hello greeting = hello();
    return join_as(greeting, token, join_for(greeting, token, session, flags));
  }

  Frame join_as(const protocol::Hello& greeting, const std::string& token,
                const protocol::Join& join) {
    Frame reply = ask(protocol::Opcode::kJoin, bytes_of(join));
    if (reply.header.status == protocol::Status::kOk &&
        (join.flags & protocol::Join::kAuthenticated) != 0) {
      const protocol::MacKeys keys = protocol::mac_keys(token, greeting, join);
      stream_.authenticate(keys.to_box, keys.to_client);
      authenticator_.emplace(keys.to_box);
    }
    return reply;
  }

 private:
  const char* check(const protocol::Header& header) override {
    return protocol::malformed_reply(header);
  }

  std::byte* payload_destination(const protocol::Header& header,
                                 std::span<const std::byte>) override {
    payload_.resize(header.payload_bytes);
    return payload_.data();
  }

  void frame(const protocol::Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override {
    frames_.push_back(
        {header, {body.begin(), body.end()}, std::move(payload_), std::move(descriptor)});
    payload_.clear();
  }

  protocol::FrameStream stream_;
  std::optional<protocol::Authenticator> authenticator_;  // for send_bytes()
  uint64_t last_id_ = 0;
  std::vector<std::byte> payload_;
  std::deque<Frame> frames_;
};

}  // namespace hbm::box
