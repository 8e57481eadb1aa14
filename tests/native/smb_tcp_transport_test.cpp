// Transfers over tcp, with any number of connections.
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "box/transport/slices.h"
#include "smb_transport_fixture.h"

#ifdef __SANITIZE_THREAD__
// A box thread sends bytes of a segment. The client receives all of them, then writes to the same
// bytes over another connection, which another box thread serves. So the network orders the send
// before the write. But in sendmsg, ThreadSanitizer releases the socket before it records the read
// of the bytes. So it does not see this order.
extern "C" const char* __tsan_default_suppressions() {
  return "race:^hbm::box::protocol::FrameOutput::flush\n";
}
#endif

namespace hbm::box::transport {
namespace {

class TcpTransfers : public testing::TestWithParam<uint32_t> {
 protected:
  Box box_;
  OpenedTransport opened_ = open_tcp(box_.opening(GetParam()));
  Transport& transport_ = *opened_.transport;
};

INSTANTIATE_TEST_SUITE_P(Connections, TcpTransfers, testing::Values(1, 2, 4, 16));

TEST_P(TcpTransfers, MovesAnySize) {
  constexpr uint64_t kOffset = 13;
  constexpr uint64_t kMost = uint64_t{64} << 20;
  const auto grant = alloc(transport_, 1, kMost + kOffset);
  std::byte* const target = box_.handler.segment(1)->block->base() + kOffset;
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{1}, uint64_t{4093}, uint64_t{65537}, uint64_t{kSliceBytes},
        uint64_t{kSliceBytes + 1}, uint64_t{7368787}, kMost}) {
    SCOPED_TRACE(bytes);
    std::vector<std::byte> data = random_bytes(bytes);
    move(transport_, Opcode::kWrite, *grant, kOffset, data);
    EXPECT_TRUE(same(data, target));
    std::vector<std::byte> back(bytes + 2, std::byte{0x5a});
    move(transport_, Opcode::kRead, *grant, kOffset, std::span(back).subspan(1, bytes));
    EXPECT_TRUE(same(data, back.data() + 1));
    EXPECT_EQ(back.front(), std::byte{0x5a});
    EXPECT_EQ(back.back(), std::byte{0x5a});
  }
}

TEST_P(TcpTransfers, MovesManyTogether) {
  constexpr uint64_t kCount = 300;
  constexpr uint64_t kSpan = 300000;
  const auto grant = alloc(transport_, 1, kCount * kSpan);
  std::vector<std::byte> data = random_bytes(kCount * kSpan);
  std::vector<std::byte> back(data.size());
  for (const Opcode opcode : {Opcode::kWrite, Opcode::kRead}) {
    std::vector<std::byte>& local = opcode == Opcode::kWrite ? data : back;
    std::vector<std::unique_ptr<TransportRequest>> requests;
    for (uint64_t i = 0; i < kCount; ++i) {
      const uint64_t head = i % 3 == 0 ? kSpan : 1000;  // one long transfer, or two shorter ones
      const std::span part(local.data() + i * kSpan, kSpan);
      requests.push_back(transfer(opcode, *grant, i * kSpan, part.first(head)));
      transport_.post(*requests.back());
      if (head == kSpan) continue;
      requests.push_back(transfer(opcode, *grant, i * kSpan + head, part.subspan(head)));
      transport_.post(*requests.back());
    }
    for (const auto& request : requests) {
      finish(transport_, *request);
      EXPECT_EQ(request->status, Status::kOk) << request->cause;
    }
  }
  EXPECT_EQ(data, back);
}

TEST_P(TcpTransfers, FailedSliceFailsTheTransfer) {
  const auto grant = alloc(transport_, 1, 10 << 20);
  std::vector<std::byte> data(20 << 20);
  for (const Opcode opcode : {Opcode::kRead, Opcode::kWrite}) {
    const auto request = transfer(opcode, *grant, 0, data);
    transport_.post(*request);
    finish(transport_, *request);
    EXPECT_EQ(request->status, Status::kRange);
    EXPECT_EQ(request->cause, "past the end of the segment");
  }
  move(transport_, Opcode::kRead, *grant, 0, std::span(data).first(10 << 20));
}

TEST_P(TcpTransfers, BreaksIfTheBoxDiesDuringATransfer) {
  constexpr uint64_t kBytes = uint64_t{64} << 20;
  for (const Opcode opcode : {Opcode::kRead, Opcode::kWrite}) {
    Box box;
    OpenedTransport opened = open_tcp(box.opening(GetParam()));
    const auto grant = alloc(*opened.transport, 1, kBytes);
    std::vector<std::byte> data(kBytes);
    std::vector<std::unique_ptr<TransportRequest>> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back(transfer(opcode, *grant, 0, data));
      opened.transport->post(*requests.back());
    }
    finish(*opened.transport, *requests.front());
    std::thread killer([&] { box.die(); });
    EXPECT_THROW(finish(*opened.transport, *requests.back()), Broken);
    killer.join();
    EXPECT_FALSE(requests.back()->finished());
    EXPECT_FALSE(opened.transport->alive());
    EXPECT_THROW(opened.transport->progress(0ns), Broken);
    opened.transport.reset();
    std::memset(data.data(), 0x5a, data.size());
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(data, std::vector<std::byte>(kBytes, std::byte{0x5a}));
  }
}

// Counts the TCP segments with data that the connection has sent.
uint64_t segments_sent(int socket) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  EXPECT_EQ(getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
  return info.tcpi_data_segs_out;
}

TEST(TcpTransport, GathersShortRequests) {
  Box box;
  const OpenedTransport opened = open_tcp(box.opening(1));
  const auto grant = alloc(*opened.transport, 1, 1 << 20);
  const uint64_t before = segments_sent(opened.transport->liveness_fd());
  std::vector<std::byte> data(64);
  std::vector<std::unique_ptr<TransportRequest>> requests;
  for (int i = 0; i < 500; ++i) {
    requests.push_back(transfer(Opcode::kRead, *grant, 0, data));
    opened.transport->post(*requests.back());
  }
  for (const auto& request : requests) finish(*opened.transport, *request);
  EXPECT_LT(segments_sent(opened.transport->liveness_fd()) - before, 60u);
}

TEST(TcpTransport, SharesALargeTransferAmongTheConnections) {
  Box box;
  const OpenedTransport opened = open_tcp(box.opening(4));
  const auto grant = alloc(*opened.transport, 1, 64 << 20);
  std::vector<std::byte> data(64 << 20);
  move(*opened.transport, Opcode::kWrite, *grant, 0, data);
  EXPECT_EQ(box.handler.writes, data.size() / kSliceBytes);
}

}  // namespace
}  // namespace hbm::box::transport
