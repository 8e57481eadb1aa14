// The common behaviour of the stream transports, with the real listener and the tests' handler
// (smb_transport_handler.h).
#include "box/transport/transport.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

#include "box/protocol/socket.h"
#include "box/transport/slices.h"
#include "expect_error.h"
#include "smb_transport_fixture.h"

namespace hbm::box::transport {
namespace {

OpenedTransport open_one(protocol::TransportKind transport, const TransportOptions& opening) {
  return transport == protocol::TransportKind::kShm ? open_shm(opening) : open_tcp(opening);
}

class EveryStreamTransport : public testing::TestWithParam<protocol::TransportKind> {
 protected:
  Box box_;
  OpenedTransport opened_ = open_one(GetParam(), box_.opening());
  Transport& transport_ = *opened_.transport;
};

INSTANTIATE_TEST_SUITE_P(Transports, EveryStreamTransport,
                         testing::Values(protocol::TransportKind::kTcp,
                                         protocol::TransportKind::kShm),
                         [](const auto& info) {
                           return info.param == protocol::TransportKind::kTcp ? "tcp" : "shm";
                         });

TEST_P(EveryStreamTransport, ReportsTheTextOfTheBox) {
  EXPECT_EQ(transport_.kind(), GetParam());
  EXPECT_EQ(opened_.joined.generation, box_.handler.generation());
  EXPECT_EQ(opened_.joined.session, (protocol::Id{1, 1}));
  EXPECT_EQ(opened_.joined.lease_ms, box_.handler.lease_ms());
  EXPECT_EQ(box_.handler.joins, GetParam() == protocol::TransportKind::kTcp ? 4 : 1);
  EXPECT_EQ(why_no_shm(opened_.joined), "");
}

TEST_P(EveryStreamTransport, CarriesRequestsAndReplies) {
  const auto add = fetch_add(-5);
  const auto stats = make_request(Opcode::kStats, bytes_of(protocol::StatsQuery{}));
  const auto refused = make_request(Opcode::kDelete, bytes_of(protocol::Release{}));
  for (const auto* request : {&add, &stats, &refused}) transport_.post(**request);
  for (const auto* request : {&add, &stats, &refused}) finish(transport_, **request);

  EXPECT_EQ(fetched(*add), -5);

  protocol::StatsTotals totals{};
  ASSERT_EQ(stats->payload.size(), sizeof(totals));
  std::memcpy(&totals, stats->payload.data(), sizeof(totals));
  EXPECT_EQ(totals.segments, 3u);

  EXPECT_EQ(refused->status, Status::kNotAttached);
  EXPECT_EQ(refused->cause, "no such handle");
  EXPECT_TRUE(refused->reply.empty());
}

TEST_P(EveryStreamTransport, KeepsRequestOrderAndMatchesReplies) {
  box_.handler.hold_answers = true;
  std::vector<std::unique_ptr<TransportRequest>> requests;
  for (int i = 0; i < 50; ++i) {
    requests.push_back(i % 2 == 0 ? fetch_add(i) : make_request(Opcode::kPing));
    transport_.post(*requests.back());
  }
  transport_.progress(50ms);
  EXPECT_TRUE(
      std::none_of(requests.begin(), requests.end(), [](auto& w) { return w->finished(); }));
  while (box_.handler.held() < requests.size()) transport_.progress(1ms);
  box_.handler.answer_held();
  for (const auto& request : requests) finish(transport_, *request);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(box_.handler.submitted[i], requests[i]->opcode);
    if (i % 2 != 0) continue;
    EXPECT_EQ(fetched(*requests[i]), static_cast<int64_t>(i));
  }
}

TEST_P(EveryStreamTransport, ProgressReturnsInTime) {
  const auto start = std::chrono::steady_clock::now();
  transport_.progress(1h);  // returns immediately: nothing is in flight

  box_.handler.hold_answers = true;
  const auto ping = make_request(Opcode::kPing);
  transport_.post(*ping);
  transport_.progress(0ns);
  transport_.progress(20ms);
  EXPECT_FALSE(ping->finished());
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);

  std::thread waker([&] {
    std::this_thread::sleep_for(20ms);
    transport_.wake();
  });
  transport_.progress(1h);
  waker.join();
  while (box_.handler.held() == 0) transport_.progress(1ms);
  box_.handler.answer_held();
  finish(transport_, *ping);
}

TEST_P(EveryStreamTransport, DetectsTheBoxsEnd) {
  EXPECT_TRUE(transport_.alive());
  const auto grant = alloc(transport_, 1, 4096);
  box_.die();
  pollfd idle{transport_.liveness_fd(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&idle, 1, 60'000), 1);
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (transport_.alive() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_FALSE(transport_.alive());
  const auto ping = make_request(Opcode::kPing);
  expect_error(ErrorKind::kNetwork, {"closed the connection"}, [&] {
    transport_.post(*ping);
    for (;;) transport_.progress(1s);
  });
  EXPECT_THROW(transport_.post(*ping), Broken);
  EXPECT_FALSE(ping->finished());
}

TEST_P(EveryStreamTransport, RefusalHasACause) {
  TransportOptions opening = box_.opening();
  opening.token = "another";
  try {
    open_one(GetParam(), opening);
    ADD_FAILURE() << "joined with a wrong token";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.status(), Status::kDenied);
    EXPECT_NE(std::string(refused.what()).find("token"), std::string::npos) << refused.what();
  }
  opening.token.clear();
  try {
    open_one(GetParam(), opening);
    ADD_FAILURE() << "joined without a token";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.status(), Status::kDenied);
  }
  box_.handler.refuse = Status::kExpired;
  opening.token = kToken;
  opening.join.session = {9, 9};
  try {
    open_one(GetParam(), opening);
    ADD_FAILURE() << "joined an expired session";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.status(), Status::kExpired);
    EXPECT_STREQ(refused.what(), "the handler refuses");
  }
}

TEST(StreamTransport, RefusesABoxWithoutAProofOfTheToken) {
  const Box box("");
  expect_error(ErrorKind::kNetwork, {"without a token"}, [&] { open_tcp(box.opening()); });
  TransportOptions opening = box.opening();
  opening.token.clear();
  EXPECT_TRUE(open_tcp(opening).transport->alive());
}

TEST(StreamTransport, ErrorNamesTheCause) {
  Box box;
  TransportOptions opening = box.opening();
  box.die();
  expect_error(ErrorKind::kNetwork, {"127.0.0.1", "refused"}, [&] { open_tcp(opening); });
  expect_error(ErrorKind::kNetwork, {opening.path}, [&] { open_shm(opening); });
  for (uint32_t connections : {0, 17}) {
    opening.connections = connections;
    expect_error(ErrorKind::kInvalid, {"lanes", "16"}, [&] { open_tcp(opening); });
  }
}

TEST(StreamTransport, SilentPeerTimesOut) {
  const Descriptor listener = protocol::listen_at(protocol::parse_host_and_port("127.0.0.1:0"));
  TransportOptions opening;
  opening.host = "127.0.0.1";
  opening.port = protocol::local_port(listener.get());
  opening.timeout = 500ms;
  expect_error(ErrorKind::kNetwork, {"hello", "did not come in time"}, [&] { open_tcp(opening); });
}

TEST(StreamTransport, JoinsTheGivenSession) {
  Box box;
  TransportOptions opening = box.opening(3);
  opening.join.session = {5, 6};
  EXPECT_EQ(open_tcp(opening).joined.session, (protocol::Id{5, 6}));
}

}  // namespace
}  // namespace hbm::box::transport
