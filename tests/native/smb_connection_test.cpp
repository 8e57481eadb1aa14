// A connection with a box that violates the protocol.
#include "box/transport/connection.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "expect_error.h"

namespace hbm::box::transport {
namespace {

using protocol::Header;
using protocol::Opcode;
using protocol::Status;

class Asker final : public Connection::Requester {
 public:
  void answered(TransportRequest&, Descriptor) override { ++requests; }
  void answered(const Slice&, Status status, const std::string& cause) override {
    ++slices;
    last = status;
    words = cause;
  }

  int requests = 0;
  int slices = 0;
  Status last{};
  std::string words;
};

class RogueBox : public testing::Test {
 protected:
  RogueBox() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    box_ = Descriptor(ends[1]);
    connection_ = std::make_unique<Connection>(
        std::make_unique<protocol::FrameStream>(Descriptor(ends[0])), "test:1", asker_);
  }

  void ask(Opcode opcode, uint32_t bytes = 0) {
    Slice slice;
    slice.opcode = opcode;
    slice.transfer.bytes = bytes;
    slice.local = memory_.data();
    connection_->send(slice);
    connection_->flush();
  }

  void ask(TransportRequest& request) {
    connection_->send(request);
    connection_->flush();
  }

  // Returns the header of the next request, in the order of arrival. Drops the `rest` bytes of the
  // request's body.
  Header take(size_t rest = sizeof(protocol::Transfer)) {
    Header header;
    EXPECT_EQ(recv(box_.get(), &header, sizeof(header), MSG_WAITALL),
              static_cast<ssize_t>(sizeof(header)));
    std::vector<std::byte> body(rest);
    EXPECT_EQ(recv(box_.get(), body.data(), rest, MSG_WAITALL), static_cast<ssize_t>(rest));
    return header;
  }

  void answer(Header header, const std::string& payload = {}, uint32_t body_bytes = 0) {
    header.body_bytes = body_bytes;
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
    frame += std::string(body_bytes, '\0') + payload;
    ASSERT_EQ(send(box_.get(), frame.data(), frame.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.size()));
  }

  void expect_malformed(const std::string& why) {
    expect_error(ErrorKind::kNetwork, {why}, [&] { connection_->receive(); });
    EXPECT_EQ(asker_.requests + asker_.slices, 0);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(protocol::kMaxPayload);
  Asker asker_;
  Descriptor box_;
  std::unique_ptr<Connection> connection_;
};

TEST_F(RogueBox, ValidRepliesAreAccepted) {
  ask(Opcode::kRead, 5);
  answer(take(), "hello");
  connection_->receive();
  EXPECT_EQ(asker_.slices, 1);
  EXPECT_EQ(std::memcmp(memory_.data(), "hello", 5), 0);
  EXPECT_EQ(connection_->unanswered(), 0u);
  EXPECT_EQ(connection_->moving_bytes(), 0u);
}

TEST_F(RogueBox, RefusalsWithACauseAreAccepted) {
  ask(Opcode::kRead, 5);
  Header header = take();
  header.status = Status::kRange;
  answer(header, "past the end");
  connection_->receive();
  EXPECT_EQ(asker_.last, Status::kRange);
  EXPECT_EQ(asker_.words, "past the end");
  EXPECT_EQ(memory_[0], std::byte{});
}

TEST_F(RogueBox, CannotAnswerAnUnsentRequest) {
  answer(Header{.opcode = Opcode::kPing, .id = 1});
  expect_malformed("replies to no request");
}

TEST_F(RogueBox, CannotAnswerTwice) {
  ask(Opcode::kRead, 1);
  const Header header = take();
  answer(header, "a");
  connection_->receive();
  asker_.slices = 0;
  ask(Opcode::kRead, 1);  // has the first request's index, with another id
  answer(header, "b");
  expect_malformed("replies to no request");
}

TEST_F(RogueBox, CannotAnswerAnotherKind) {
  ask(Opcode::kRead, 5);
  Header header = take();
  header.opcode = Opcode::kWrite;
  answer(header);
  expect_malformed("another opcode");
}

TEST_F(RogueBox, CannotWritePastTheBuffer) {
  ask(Opcode::kRead, 5);
  answer(take(), "hello, world");
  expect_malformed("its payload");
}

TEST_F(RogueBox, CannotSendTooFewBytes) {
  ask(Opcode::kRead, 5);
  answer(take(), "hell");
  expect_malformed("its payload");
}

TEST_F(RogueBox, CannotSendTooLongACause) {
  ask(Opcode::kRead, 5);
  Header header = take();
  header.status = Status::kInternal;
  answer(header, std::string(100'000, 'x'));
  expect_malformed("too long");
}

TEST_F(RogueBox, CannotSendAnotherBody) {
  TransportRequest request;
  request.opcode = Opcode::kFetchAdd;
  request.body.resize(sizeof(protocol::FetchAdd));
  ask(request);
  answer(take(sizeof(protocol::FetchAdd)), "", 4);
  expect_malformed("its body");
}

TEST_F(RogueBox, CannotAnswerAnIncompletelySentWrite) {
  ask(Opcode::kWrite, protocol::kMaxPayload);  // more than the socket holds
  answer(take());
  expect_malformed("not fully sent");
}

TEST_F(RogueBox, EndsWhenItCloses) {
  ask(Opcode::kRead, 5);
  take();
  box_ = Descriptor();
  expect_error(ErrorKind::kNetwork, {"test:1", "closed the connection"},
               [&] { connection_->receive(); });
}

}  // namespace
}  // namespace hbm::box::transport
