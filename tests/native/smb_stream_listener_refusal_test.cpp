// Clients that a stream listener does not let in, and acts that cost a client its connection.
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

namespace hbm::box {
namespace {

INSTANTIATE_TEST_SUITE_P(Addresses, StreamListenerTest, testing::Values(&Box::tcp, &Box::local),
                         [](const auto& info) { return info.index == 0 ? "Tcp" : "Unix"; });

void expect_refused(RawClient& client, Status status, const std::string& cause) {
  const smb::Frame reply = client.next();
  EXPECT_EQ(reply.header.status, status);
  EXPECT_NE(reply.text().find(cause), std::string::npos) << reply.text();
  EXPECT_TRUE(client.closed());
}

TEST_P(StreamListenerTest, RefusesAWrongOrMissingToken) {
  Box box;
  for (const std::string token : {"", "wrong", "the token "}) {
    RawClient client(address(box));
    const smb::Hello hello = client.hello();
    client.send(Opcode::kJoin, bytes_of(RawClient::join_for(hello, token)));
    expect_refused(client, Status::kDenied, token.empty() ? "has none" : "not the box's");
  }
  EXPECT_EQ(box.handler.joined, 0);
  expect_served(box);
}

TEST_P(StreamListenerTest, LetsEveryoneInWithoutAToken) {
  Box box(options_with(""));
  RawClient client(address(box));
  const smb::Hello hello = client.hello();
  EXPECT_EQ(hello.token_required, 0U);
  const auto reply = client.ask(Opcode::kJoin, bytes_of(RawClient::join_for(hello, "any")));
  EXPECT_TRUE(smb::equal(reply.as<smb::Joined>().proof, smb::Proof{}));
}

TEST_P(StreamListenerTest, RefusesAJoinOfAnEarlierConnection) {
  Box box;
  smb::Join overheard;
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

TEST_P(StreamListenerTest, SaysWhyTheHandlerRefuses) {
  Box box;
  RawClient client(address(box));
  const smb::Hello hello = client.hello();
  client.send(Opcode::kJoin, bytes_of(RawClient::join_for(hello, kToken, {404, 404})));
  expect_refused(client, Status::kExpired, "the session is not known");
}

TEST_P(StreamListenerTest, TellsTheFirst64KiBOfACause) {
  constexpr size_t kMost = 64 << 10;
  Box box;
  const auto client = joined(address(box));
  for (const size_t bytes : {kMost, kMost + 1, 3 * kMost}) {
    box.handler.refuse_with(std::string(bytes, 'x'));
    const smb::Frame reply = client->ask(Opcode::kDelete, bytes_of(smb::Release{}));
    EXPECT_EQ(reply.header.status, Status::kNoSuchKey);
    EXPECT_EQ(reply.text(), std::string(kMost, 'x'));
  }
}

TEST_P(StreamListenerTest, TakesNothingButAJoinFirst) {
  Box box;
  for (const Opcode opcode : {Opcode::kPing, Opcode::kRead, Opcode::kWrite, Opcode::kLeave}) {
    RawClient client(address(box));
    client.hello();
    const std::vector<std::byte> body(
        static_cast<size_t>(std::max(0, smb::request_body_bytes(opcode))));
    client.send(opcode, body);
    expect_refused(client, Status::kMalformed, "has not joined");
  }
  EXPECT_EQ(box.handler.submitted, 0);
  expect_served(box);
}

TEST_P(StreamListenerTest, TakesNoSecondJoin) {
  Box box;
  const auto client = joined(address(box));
  client->send(Opcode::kJoin, bytes_of(smb::Join{}));
  expect_refused(*client, Status::kMalformed, "joined before");
  EXPECT_EQ(box.handler.joined, 1);
}

TEST_P(StreamListenerTest, ClosesOnMalformedFrames) {
  Box box;
  const auto bystander = joined(address(box));
  const auto spoiled = [&](const std::string& cause, const std::function<void(smb::Header&)>& spoil,
                           bool before_joining) {
    RawClient client(address(box));
    if (before_joining) {
      client.hello();
    } else {
      ASSERT_EQ(client.join(kToken).header.status, Status::kOk);
    }
    smb::Header header;
    header.opcode = before_joining ? Opcode::kJoin : Opcode::kWrite;
    header.body_bytes = before_joining ? sizeof(smb::Join) : sizeof(smb::Transfer);
    spoil(header);
    struct {
      smb::Header header;
      smb::Transfer transfer;
    } const frame{header, transfer_of(0, 16)};
    client.send_bytes(std::as_bytes(std::span(&frame, 1)));
    expect_refused(client, Status::kMalformed, cause);
  };
  for (const bool before : {true, false}) {
    spoiled("version", [](smb::Header& header) { header.version = 9; }, before);
    spoiled("SMB1", [](smb::Header& header) { header.magic = 0x20544547; }, before);
    spoiled("opcode", [](smb::Header& header) { header.opcode = Opcode{99}; }, before);
    spoiled("no request", [](smb::Header& header) { header.opcode = Opcode::kHello; }, before);
    spoiled("body", [](smb::Header& header) { header.body_bytes = UINT32_MAX; }, before);
    spoiled("body", [](smb::Header& header) { header.body_bytes -= 1; }, before);
    spoiled("payload", [](smb::Header& header) { header.payload_bytes = UINT32_MAX; }, before);
    spoiled("status", [](smb::Header& header) { header.status = Status::kRange; }, before);
  }
  spoiled("payload", [](smb::Header& header) { header.payload_bytes = 1; }, true);
  spoiled("another size", [](smb::Header& header) { header.payload_bytes = 17; }, false);
  spoiled("another size", [](smb::Header&) {}, false);

  const auto greedy = joined(address(box));
  greedy->send(Opcode::kRead, bytes_of(transfer_of(0, smb::kMaxPayload + 1)));
  expect_refused(*greedy, Status::kMalformed, "more than a payload");
  EXPECT_EQ(bystander->ask(Opcode::kPing).header.status, Status::kOk);
}

TEST_P(StreamListenerTest, OutlivesTruncatedFrames) {
  Box box;
  for (size_t bytes = 0; bytes < sizeof(smb::Header) + sizeof(smb::Join); bytes += 5) {
    RawClient client(address(box));
    client.hello();
    smb::Header header;
    header.opcode = Opcode::kJoin;
    header.body_bytes = sizeof(smb::Join);
    std::vector<std::byte> frame(sizeof(header) + sizeof(smb::Join));
    std::memcpy(frame.data(), &header, sizeof(header));
    client.send_bytes({frame.data(), bytes});
  }
  for (const size_t bytes : {10, 30, 5000, 500'000}) {
    const auto client = joined(address(box));
    smb::Header header;
    header.opcode = Opcode::kWrite;
    header.body_bytes = sizeof(smb::Transfer);
    header.payload_bytes = smb::kMaxPayload;
    const auto transfer = transfer_of(0, smb::kMaxPayload);
    std::vector<std::byte> frame(bytes + sizeof(header) + sizeof(transfer));
    std::memcpy(frame.data(), &header, sizeof(header));
    std::memcpy(frame.data() + sizeof(header), &transfer, sizeof(transfer));
    client->send_bytes({frame.data(), bytes});
  }
  EXPECT_TRUE(eventually([&box] { return box.handler.left_again == 4; }));
  expect_served(box);
}

TEST(StreamListener, SendsAwayWhoDoesNotJoinInTime) {
  StreamListenerOptions options = options_with();
  options.join_within = std::chrono::milliseconds(100);
  Box box(options);
  const auto member = joined(box.tcp());
  RawClient silent(box.tcp());
  RawClient slow(box.local());
  slow.send_bytes(bytes_of(smb::kMagic));
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(slow.closed());
  EXPECT_EQ(member->ask(Opcode::kPing).header.status, Status::kOk);
}

TEST(StreamListener, HasRoomForSoManyWhoHaveNotJoined) {
  StreamListenerOptions options = options_with();
  options.most_joining = 3;
  Box box(options);
  std::vector<std::unique_ptr<RawClient>> silent;
  for (int i = 0; i < 4; ++i) {
    silent.push_back(std::make_unique<RawClient>(box.tcp()));
    silent.back()->hello();
  }
  EXPECT_TRUE(silent.front()->closed());
  expect_served(box);  // which has taken the next one's place
  EXPECT_TRUE(silent[1]->closed());
}

// Runs `action` in a child that is another user, and returns what it returns.
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

TEST(StreamListener, LetsInTheUsersThatItWasTold) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const auto folder = std::filesystem::path(options_with().socket_path).parent_path();
  ASSERT_EQ(chmod(folder.c_str(), 0711), 0);  // the socket's mode shall decide
  const auto call = [](const std::string& path) {
    return as_another_user([&path] {
      RawClient client(smb::Address{"", 0, path});
      const smb::Frame first = client.next();
      return first.header.opcode == Opcode::kHello ? static_cast<int>(first.header.status) : 103;
    });
  };
  {
    Box box;
    EXPECT_EQ(call(box.options.socket_path), 102);  // the file's mode keeps it out
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
}  // namespace hbm::box
