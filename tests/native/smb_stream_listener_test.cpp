// The service of a stream listener to admitted clients.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "memory/pool.h"
#include "smb_listener_fixture.h"

namespace hbm::box::server::listener {
namespace {

INSTANTIATE_TEST_SUITE_P(Addresses, StreamListenerTest, testing::Values(&Box::tcp, &Box::local),
                         [](const auto& info) { return info.index == 0 ? "Tcp" : "Unix"; });

std::vector<std::byte> pattern(size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = std::byte(i * 31 + i / 251 + seed);
  return data;
}

TEST_P(StreamListenerTest, BothEndsProveTheToken) {
  Box box;
  RawClient client(address(box));
  const protocol::Hello hello = client.hello();
  EXPECT_EQ(hello.token_required, 1U);
  const protocol::Join join = RawClient::join_for(hello, kToken);
  const Frame reply = client.ask(Opcode::kJoin, bytes_of(join));
  ASSERT_EQ(reply.header.status, Status::kOk) << reply.text();
  const auto joined = reply.as<protocol::Joined>();
  EXPECT_TRUE(protocol::equal(joined.proof, protocol::server_proof(kToken, hello, join, joined)));
  EXPECT_EQ(joined.generation, (protocol::Id{7, 8}));
  EXPECT_EQ(joined.lease_ms, 30'000U);
  EXPECT_EQ(joined.verbs_port, 77);
  EXPECT_STREQ(joined.boot_id, "a-boot-id");
  EXPECT_EQ(joined.socket_path, box.options.socket_path);
}

TEST_P(StreamListenerTest, WritesAndReadsTheSegment) {
  Box box;
  const auto client = joined(address(box));
  unsigned seed = 0;
  for (const uint32_t bytes : {0U, 1U, 4096U, 65'536U, 100'001U, protocol::kMaxPayload}) {
    const auto data = pattern(bytes, ++seed);
    const auto transfer = transfer_of(4097, bytes);
    EXPECT_EQ(client->ask(Opcode::kWrite, bytes_of(transfer), data).header.status, Status::kOk);
    EXPECT_TRUE(std::equal(data.begin(), data.end(), box.handler.memory().begin() + 4097));
    const Frame reply = client->ask(Opcode::kRead, bytes_of(transfer));
    EXPECT_EQ(reply.header.status, Status::kOk);
    EXPECT_TRUE(reply.payload == data) << bytes;
  }
}

TEST_P(StreamListenerTest, RefusesTransfersTheHandlerRefuses) {
  Box box;
  const auto client = joined(address(box));
  const auto data = pattern(100'000, 1);
  for (const bool writing : {false, true}) {
    const auto ask = [&](const protocol::Transfer& transfer) {
      return writing ? client->ask(Opcode::kWrite, bytes_of(transfer), data)
                     : client->ask(Opcode::kRead, bytes_of(transfer));
    };
    const Frame missing = ask(transfer_of(0, 100'000, 9));
    EXPECT_EQ(missing.header.status, Status::kNotAttached);
    EXPECT_EQ(missing.text(), "handle 9 is not attached");
    const Frame outside = ask(transfer_of(UINT64_MAX, 100'000));
    EXPECT_EQ(outside.header.status, Status::kRange);
    EXPECT_EQ(outside.text(), "range");
  }
  EXPECT_EQ(client->ask(Opcode::kPing).header.status, Status::kOk);
}

TEST_P(StreamListenerTest, SendsRepliesOfAnyThread) {
  for (const auto answers : {FakeHandler::Answers::kAtOnce, FakeHandler::Answers::kByThread}) {
    Box box(options_with(), answers);
    const auto client = joined(address(box));
    constexpr int64_t kCount = 500;  // more requests than may be unanswered at a time
    for (int64_t i = 0; i < kCount; ++i) {
      protocol::FetchAdd request{};
      request.addend = i;
      client->queue(Opcode::kFetchAdd, bytes_of(request));
      const auto transfer = transfer_of(0, 4096);
      if (i % 3 == 0) client->queue(Opcode::kRead, bytes_of(transfer));
    }
    client->flush();
    int64_t fetched = 0;
    for (int64_t i = 0; i < kCount + (kCount + 2) / 3; ++i) {
      const Frame reply = client->next();
      ASSERT_EQ(reply.header.status, Status::kOk);
      if (reply.header.opcode == Opcode::kFetchAdd) {
        EXPECT_EQ(reply.as<protocol::Fetched>().before, fetched++);
      }
    }
    EXPECT_EQ(fetched, kCount);
    const Frame refused = client->ask(Opcode::kDelete, bytes_of(protocol::Release{}));
    EXPECT_EQ(refused.header.status, Status::kNoSuchKey);
    EXPECT_EQ(refused.text(), "no such key");
    EXPECT_TRUE(refused.body.empty());
    EXPECT_EQ(client->ask(Opcode::kStats, bytes_of(protocol::StatsQuery{})).payload.size(),
              sizeof(protocol::StatsTotals));
  }
}

TEST_P(StreamListenerTest, NotifiesTheHandlerOfDisconnects) {
  Box box;
  {
    const auto client = joined(address(box));
    const auto other = joined(address(box));
    EXPECT_EQ(box.handler.joined, 2);
  }
  EXPECT_TRUE(eventually([&box] { return box.handler.left_again == 2; }));
  const auto last = joined(address(box));
  box.listener.reset();
  EXPECT_EQ(box.handler.left_again, 3);
  EXPECT_TRUE(last->closed());
}

TEST_P(StreamListenerTest, ClosesTheConnectionsOfEndedSessions) {
  Box box;
  const auto silent = joined(address(box));
  const auto busy = joined(address(box));
  const RawClient not_joined(address(box));
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_EQ(box.handler.left_again, 0);
  box.handler.sessions_ended = true;
  EXPECT_EQ(busy->ask(Opcode::kPing).header.status, Status::kOk);  // replies are still sent
  EXPECT_TRUE(eventually([&box] { return box.handler.left_again == 2; }));
  EXPECT_TRUE(silent->closed());
  box.handler.sessions_ended = false;
  expect_served(box);
}

TEST_P(StreamListenerTest, EndsWithRepliesInFlight) {
  for (int round = 0; round < 20; ++round) {
    Box box(options_with(), FakeHandler::Answers::kByThread);
    std::vector<std::unique_ptr<RawClient>> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(joined(address(box)));
      for (int k = 0; k < 50; ++k) clients.back()->queue(Opcode::kPing);
      clients.back()->flush();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round * 100));
    if (round % 2 == 0) clients.clear();
    box.listener.reset();
  }
}

TEST(StreamListener, DrainsRequestsThatWereRead) {
  Box box(options_with(), FakeHandler::Answers::kByThread);
  box.handler.delay_us = 1000;
  const auto client = joined(box.tcp());
  constexpr int kCount = 50;
  for (int i = 0; i < kCount; ++i) client->queue(Opcode::kPing);
  client->flush();
  ASSERT_TRUE(eventually([&box] { return box.handler.submitted == kCount; }));
  box.listener->drain(10'000);
  const auto transfer = transfer_of(0, 4096);
  client->send(Opcode::kRead, bytes_of(transfer));  // after drain(): the box does not read it
  box.listener.reset();
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(client->next().header.opcode, Opcode::kPing);
  EXPECT_TRUE(client->closed());
}

TEST(StreamListener, DrainEndsAtItsTimeout) {
  Box box(options_with(), FakeHandler::Answers::kNever);
  const auto client = joined(box.tcp());
  client->send(Opcode::kPing);
  ASSERT_TRUE(eventually([&box] { return box.handler.submitted == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  box.listener->drain(100);
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, std::chrono::milliseconds(100));
}

std::shared_ptr<storage::BoxSegment> pool_segment() {
  memory::PoolOptions options;
  options.capacity = 1 << 20;
  auto segment = std::make_shared<storage::BoxSegment>();
  segment->size = 8192;
  segment->block = memory::Pool::create(options)->allocate(8192);
  return segment;
}

TEST(StreamListener, PassesTheSegmentsDescriptorOnAUnixSocket) {
  Box box;
  const auto segment = pool_segment();
  std::memset(segment->block->base(), 'x', 8192);
  for (const bool may_write : {true, false}) {
    box.handler.grant(segment, may_write);
    const auto near = joined(box.local());
    const Frame reply = near->ask(Opcode::kAttach, bytes_of(protocol::Attach{}));
    EXPECT_EQ(reply.as<protocol::Allocated>().key, (protocol::Id{1, 2}));
    ASSERT_GE(reply.descriptor.get(), 0);
    char got = 0;
    EXPECT_EQ(pread(reply.descriptor.get(), &got, 1, 4096), 1);
    EXPECT_EQ(got, 'x');
    EXPECT_EQ(pwrite(reply.descriptor.get(), "y", 1, 0), may_write ? 1 : -1);
    const Frame far = joined(box.tcp())->ask(Opcode::kAttach, bytes_of(protocol::Attach{}));
    EXPECT_LT(far.descriptor.get(), 0);
  }
}

TEST(StreamListener, InvalidOptionsAreErrors) {
  FakeHandler handler;
  expect_error(ErrorKind::kInvalid, {"address"}, [&handler] { StreamListener(handler, {}); });
  StreamListenerOptions options = options_with();
  options.threads = 0;
  expect_error(ErrorKind::kInvalid, {"thread"}, [&] { StreamListener(handler, options); });
  options = options_with();
  options.boot_id = std::string(40, 'b');
  expect_error(ErrorKind::kInvalid, {"boot id"}, [&] { StreamListener(handler, options); });
  const Box box;
  options = options_with();
  options.listen = {box.tcp()};
  expect_error(ErrorKind::kUnavailable, {box.tcp().host_and_port(), "in use"},
               [&] { StreamListener(handler, options); });
  EXPECT_NE(access(options.socket_path.c_str(), F_OK), 0);
}

TEST(StreamListener, RemovesItsSocket) {
  const auto options = options_with();
  {
    FakeHandler handler;
    const StreamListener listener(handler, options);
    EXPECT_EQ(access(options.socket_path.c_str(), F_OK), 0);
  }
  EXPECT_NE(access(options.socket_path.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace hbm::box::server::listener
