// Clients that a stream listener refuses, and violations that close a connection.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smb_listener_fixture.h"

namespace hbm::box::server::listener {
namespace {

INSTANTIATE_TEST_SUITE_P(Addresses, StreamListenerTest, testing::Values(&Box::tcp, &Box::local),
                         [](const auto& info) { return info.index == 0 ? "Tcp" : "Unix"; });

void expect_refused(RawClient& client, Status status, const std::string& cause) {
  const Frame reply = client.next();
  EXPECT_EQ(reply.header.status, status);
  EXPECT_NE(reply.text().find(cause), std::string::npos) << reply.text();
  EXPECT_TRUE(client.closed());
}

TEST_P(StreamListenerTest, RefusesAWrongOrMissingToken) {
  Box box;
  for (const std::string token : {"", "wrong", "the token "}) {
    RawClient client(address(box));
    const protocol::Hello hello = client.hello();
    client.send(Opcode::kJoin, bytes_of(RawClient::join_for(hello, token)));
    expect_refused(client, Status::kDenied, token.empty() ? "has none" : "not the box's");
  }
  EXPECT_EQ(box.handler.joined, 0);
  expect_served(box);
}

TEST_P(StreamListenerTest, AdmitsAllClientsWithoutAToken) {
  Box box(options_with(""));
  RawClient client(address(box));
  const protocol::Hello hello = client.hello();
  EXPECT_EQ(hello.token_required, 0U);
  const auto reply = client.ask(Opcode::kJoin, bytes_of(RawClient::join_for(hello, "any")));
  EXPECT_TRUE(protocol::equal(reply.as<protocol::Joined>().proof, protocol::Proof{}));
}

TEST_P(StreamListenerTest, RefusesAJoinOfAnEarlierConnection) {
  Box box;
  protocol::Join overheard;
  {
    RawClient client(address(box));
    overheard = RawClient::join_for(client.hello(), kToken);
    ASSERT_EQ(client.ask(Opcode::kJoin, bytes_of(overheard)).header.status, Status::kOk);
  }
  RawClient replay(address(box));
  replay.hello();
  replay.send(Opcode::kJoin, bytes_of(overheard));
  expect_refused(replay, Status::kDenied, "token");
  EXPECT_EQ(box.handler.joined, 1);
}

TEST_P(StreamListenerTest, ReportsTheHandlersCause) {
  Box box;
  RawClient client(address(box));
  const protocol::Hello hello = client.hello();
  client.send(Opcode::kJoin, bytes_of(RawClient::join_for(hello, kToken, {404, 404})));
  expect_refused(client, Status::kExpired, "the session is not known");
}

TEST_P(StreamListenerTest, SendsTheFirst64KiBOfACause) {
  constexpr size_t kMost = 64 << 10;
  Box box;
  const auto client = joined(address(box));
  for (const size_t bytes : {kMost, kMost + 1, 3 * kMost}) {
    box.handler.refuse_with(std::string(bytes, 'x'));
    const Frame reply = client->ask(Opcode::kDelete, bytes_of(protocol::Release{}));
    EXPECT_EQ(reply.header.status, Status::kNoSuchKey);
    EXPECT_EQ(reply.text(), std::string(kMost, 'x'));
  }
}

TEST_P(StreamListenerTest, RefusesRequestsBeforeAJoin) {
  Box box;
  for (const Opcode opcode : {Opcode::kPing, Opcode::kRead, Opcode::kWrite, Opcode::kLeave}) {
    RawClient client(address(box));
    client.hello();
    const std::vector<std::byte> body(
        static_cast<size_t>(std::max(0, protocol::request_body_bytes(opcode))));
    client.send(opcode, body);
    expect_refused(client, Status::kMalformed, "has not joined");
  }
  EXPECT_EQ(box.handler.submitted, 0);
  expect_served(box);
}

TEST_P(StreamListenerTest, RefusesASecondJoin) {
  Box box;
  const auto client = joined(address(box));
  client->send(Opcode::kJoin, bytes_of(protocol::Join{}));
  expect_refused(*client, Status::kMalformed, "joined before");
  EXPECT_EQ(box.handler.joined, 1);
}

TEST_P(StreamListenerTest, ClosesOnMalformedFrames) {
  Box box;
  const auto bystander = joined(address(box));
  const auto spoiled = [&](const std::string& cause,
                           const std::function<void(protocol::Header&)>& spoil,
                           bool before_joining) {
    RawClient client(address(box));
    if (before_joining) {
      client.hello();
    } else {
      ASSERT_EQ(client.join(kToken).header.status, Status::kOk);
    }
    protocol::Header header;
    header.opcode = before_joining ? Opcode::kJoin : Opcode::kWrite;
    header.body_bytes = before_joining ? sizeof(protocol::Join) : sizeof(protocol::Transfer);
    spoil(header);
    struct {
      protocol::Header header;
      protocol::Transfer transfer;
    } const frame{header, transfer_of(0, 16)};
    client.send_bytes(std::as_bytes(std::span(&frame, 1)));
    expect_refused(client, Status::kMalformed, cause);
  };
  for (const bool before : {true, false}) {
    spoiled("version", [](protocol::Header& header) { header.version = 9; }, before);
    spoiled("SMB1", [](protocol::Header& header) { header.magic = 0x20544547; }, before);
    spoiled("opcode", [](protocol::Header& header) { header.opcode = Opcode{99}; }, before);
    spoiled("no request", [](protocol::Header& header) { header.opcode = Opcode::kHello; }, before);
    spoiled("body", [](protocol::Header& header) { header.body_bytes = UINT32_MAX; }, before);
    spoiled("body", [](protocol::Header& header) { header.body_bytes -= 1; }, before);
    spoiled("payload", [](protocol::Header& header) { header.payload_bytes = UINT32_MAX; }, before);
    spoiled("status", [](protocol::Header& header) { header.status = Status::kRange; }, before);
  }
  spoiled("payload", [](protocol::Header& header) { header.payload_bytes = 1; }, true);
  spoiled("another size", [](protocol::Header& header) { header.payload_bytes = 17; }, false);
  spoiled("another size", [](protocol::Header&) {}, false);

  const auto greedy = joined(address(box));
  greedy->send(Opcode::kRead, bytes_of(transfer_of(0, protocol::kMaxPayload + 1)));
  expect_refused(*greedy, Status::kMalformed, "more than a payload");
  EXPECT_EQ(bystander->ask(Opcode::kPing).header.status, Status::kOk);
}

TEST_P(StreamListenerTest, OutlivesTruncatedFrames) {
  Box box;
  for (size_t bytes = 0; bytes < sizeof(protocol::Header) + sizeof(protocol::Join); bytes += 5) {
    RawClient client(address(box));
    client.hello();
    protocol::Header header;
    header.opcode = Opcode::kJoin;
    header.body_bytes = sizeof(protocol::Join);
    std::vector<std::byte> frame(sizeof(header) + sizeof(protocol::Join));
    std::memcpy(frame.data(), &header, sizeof(header));
    client.send_bytes({frame.data(), bytes});
  }
  for (const size_t bytes : {10, 30, 5000, 500'000}) {
    const auto client = joined(address(box));
    protocol::Header header;
    header.opcode = Opcode::kWrite;
    header.body_bytes = sizeof(protocol::Transfer);
    header.payload_bytes = protocol::kMaxPayload;
    const auto transfer = transfer_of(0, protocol::kMaxPayload);
    std::vector<std::byte> frame(bytes + sizeof(header) + sizeof(transfer));
    std::memcpy(frame.data(), &header, sizeof(header));
    std::memcpy(frame.data() + sizeof(header), &transfer, sizeof(transfer));
    client->send_bytes({frame.data(), bytes});
  }
  EXPECT_TRUE(eventually([&box] { return box.handler.left_again == 4; }));
  expect_served(box);
}

TEST(StreamListener, ClosesConnectionsThatDoNotJoinInTime) {
  StreamListenerOptions options = options_with();
  options.join_within = std::chrono::seconds(2);  // in which the member joins
  Box box(options);
  const auto member = joined(box.tcp());
  RawClient silent(box.tcp());
  RawClient slow(box.local());
  slow.send_bytes(bytes_of(protocol::kMagic));
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(slow.closed());
  EXPECT_EQ(member->ask(Opcode::kPing).header.status, Status::kOk);
}

TEST(StreamListener, BoundsConnectionsThatHaveNotJoined) {
  StreamListenerOptions options = options_with();
  options.most_joining = 3;
  Box box(options);
  std::vector<std::unique_ptr<RawClient>> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(std::make_unique<RawClient>(box.tcp()));
    silent.back()->hello();
  }
  EXPECT_TRUE(silent.front()->closed());
  expect_served(box);  // this new connection displaces the next silent client
  EXPECT_TRUE(silent[1]->closed());
}

// Runs `action` in a child process of another user. Returns its result.
int as_another_user(const std::function<int()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(100);
    int result = 101;
    try {
      result = action();
    } catch (const std::exception&) {
      result = 102;
    }
    _exit(result);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StreamListener, AdmitsTheUsersInTheOptions) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const auto directory = std::filesystem::path(options_with().socket_path).parent_path();
  ASSERT_EQ(chmod(directory.c_str(), 0711), 0);  // so that only the socket's mode decides
  const auto call = [](const std::string& path) {
    return as_another_user([&path] {
      RawClient client(protocol::Address{"", 0, path});
      const Frame first = client.next();
      return first.header.opcode == Opcode::kHello ? static_cast<int>(first.header.status) : 103;
    });
  };
  {
    Box box;
    EXPECT_EQ(call(box.options.socket_path), 102);  // the file's mode refuses the user
    ASSERT_EQ(chmod(box.options.socket_path.c_str(), 0666), 0);
    EXPECT_EQ(call(box.options.socket_path), static_cast<int>(Status::kDenied));
    EXPECT_EQ(joined(box.local())->ask(Opcode::kPing).header.status, Status::kOk);
  }
  StreamListenerOptions open = options_with();
  open.users = {65534};
  Box box(open);
  EXPECT_EQ(call(box.options.socket_path), static_cast<int>(Status::kOk));
}

}  // namespace
}  // namespace hbm::box::server::listener
