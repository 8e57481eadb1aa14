// A client and a box over tcp, and between them a relay that does not know the token.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "smb_relay.h"
#include "smb_transport_fixture.h"

namespace hbm::box::transport {
namespace {

constexpr uint64_t kSize = 1 << 20;
constexpr uint64_t kBytes = 300;

// A relay changes the third record of one direction: a request or a reply. The first record belongs
// to an alloc, the second to a write of zeros.
class AuthenticationRelay : public testing::Test {
 protected:
  void expect_broken_by(const std::function<std::vector<Bytes>(const Bytes& record)>& change,
                        Relay::Direction direction = Relay::Direction::kToBox) {
    Box box;
    std::atomic<bool> changed{false};
    const Relay relay(box.opening().port, direction, [&](uint64_t number, const Bytes& record) {
      if (number != 2) return std::vector<Bytes>{record};
      changed = true;
      return change(record);
    });
    TransportOptions opening = box.opening(1);
    opening.port = relay.port();
    const OpenedTransport opened = open_tcp(opening);
    Transport& transport = *opened.transport;
    const auto grant = alloc(transport, 1, kSize);
    std::vector<std::byte> zeros(kBytes);
    move(transport, Opcode::kWrite, *grant, 0, zeros);

    const bool writes = direction == Relay::Direction::kToBox;
    std::vector<std::byte> data(kBytes, std::byte{0x5a});
    const std::vector<std::byte> untouched = data;
    const auto request = transfer(writes ? Opcode::kWrite : Opcode::kRead, *grant, 0, data);
    std::string cause;
    try {
      transport.post(*request);
      finish(transport, *request);
    } catch (const Broken& broken) {
      cause = broken.what();
    }
    EXPECT_TRUE(changed);
    EXPECT_FALSE(request->finished());
    EXPECT_FALSE(transport.alive());
    EXPECT_NE(cause.find("altered, repeated, left out or reordered"), std::string::npos) << cause;
    EXPECT_EQ(data, untouched);
    EXPECT_TRUE(same(zeros, box.handler.segment(1)->block->base()));
  }
};

Bytes altered(Bytes record, size_t index) {
  record[index] ^= std::byte{1};
  return record;
}

// Offsets in a record with the frame of one transfer.
constexpr size_t kOffset = sizeof(protocol::RecordHeader) + sizeof(protocol::Header);
constexpr size_t kPayload = kOffset + sizeof(protocol::Transfer);

TEST_F(AuthenticationRelay, CannotAlterWhatIsWritten) {
  expect_broken_by(
      [](const Bytes& record) -> std::vector<Bytes> { return {altered(record, kPayload + 7)}; });
}

TEST_F(AuthenticationRelay, CannotAlterWhereItIsWritten) {
  expect_broken_by(
      [](const Bytes& record) -> std::vector<Bytes> { return {altered(record, kOffset + 1)}; });
}

TEST_F(AuthenticationRelay, CannotAlterWhatIsRead) {
  expect_broken_by(
      [](const Bytes& record) -> std::vector<Bytes> {
        return {altered(record, record.size() / 2)};
      },
      Relay::Direction::kToClient);
}

TEST_F(AuthenticationRelay, CannotRepeatARecord) {
  Bytes before;
  Box box;
  const Relay relay(box.opening().port, Relay::Direction::kToBox,
                    [&](uint64_t number, const Bytes& record) -> std::vector<Bytes> {
                      if (number == 2) return {record, record};
                      return {record};
                    });
  TransportOptions opening = box.opening(1);
  opening.port = relay.port();
  const OpenedTransport opened = open_tcp(opening);
  Transport& transport = *opened.transport;
  const auto grant = alloc(transport, 1, kSize);
  std::vector<std::byte> data(kBytes);
  move(transport, Opcode::kWrite, *grant, 0, data);
  const auto adds = [&] {
    const auto request = fetch_add(1);
    transport.post(*request);
    finish(transport, *request);  // executed once; the repeated record ends the connection
    const auto next = fetch_add(1);
    transport.post(*next);
    finish(transport, *next);
  };
  EXPECT_THROW(adds(), Broken);
  EXPECT_EQ(std::ranges::count(box.handler.submitted, Opcode::kFetchAdd), 1);
}

TEST_F(AuthenticationRelay, CannotReorderRecords) {
  Bytes held;
  Box box;
  const Relay relay(box.opening().port, Relay::Direction::kToBox,
                    [&](uint64_t number, const Bytes& record) -> std::vector<Bytes> {
                      if (number == 2) {
                        held = record;
                        return {};
                      }
                      if (number == 3) return {record, held};
                      return {record};
                    });
  TransportOptions opening = box.opening(1);
  opening.port = relay.port();
  const OpenedTransport opened = open_tcp(opening);
  Transport& transport = *opened.transport;
  const auto grant = alloc(transport, 1, kSize);
  std::vector<std::byte> data(kSize, std::byte{1});
  std::vector<std::byte> zeros(kBytes);
  move(transport, Opcode::kWrite, *grant, 0, zeros);
  const auto request = transfer(Opcode::kWrite, *grant, 0, data);
  transport.post(*request);
  EXPECT_THROW(finish(transport, *request), Broken);
  EXPECT_TRUE(same(zeros, box.handler.segment(1)->block->base()));
}

// Shows that the relay can change an unauthenticated connection.
TEST(UnauthenticatedRelay, AltersWhatIsWritten) {
  Box box(kToken, /*seal=*/false);
  const Relay relay(
      box.opening().port, Relay::Direction::kToBox,
      [](uint64_t number, const Bytes& frame) -> std::vector<Bytes> {
        return {number == 1 ? altered(frame, kPayload - sizeof(protocol::RecordHeader)) : frame};
      },
      /*authenticated=*/false);
  TransportOptions opening = box.opening(1);
  opening.port = relay.port();
  opening.seal = false;
  const OpenedTransport opened = open_tcp(opening);
  const auto grant = alloc(*opened.transport, 1, kSize);
  std::vector<std::byte> zeros(kBytes);
  move(*opened.transport, Opcode::kWrite, *grant, 0, zeros);
  EXPECT_EQ(box.handler.segment(1)->block->base()[0], std::byte{1});
}

// A relay could change the Hello to make one end believe that the other end does not authenticate.
// In this test, the options of the ends differ instead. The connection is refused before the client
// joins.
TEST(AuthenticationAgreement, IsNotTheRelaysToMake) {
  for (const bool client : {true, false}) {
    Box box(kToken, /*seal=*/!client);
    TransportOptions opening = box.opening(1);
    opening.seal = client;
    try {
      open_tcp(opening);
      ADD_FAILURE() << "joined";
    } catch (const Refused& refused) {
      EXPECT_EQ(refused.status(), Status::kUnsupported);
      EXPECT_NE(std::string(refused.what())
                    .find(client ? "the client authenticates" : "the box authenticates"),
                std::string::npos)
          << refused.what();
    }
    EXPECT_EQ(box.handler.joins, 0);
  }
}

TEST(AuthenticationAgreement, CanBeNotTo) {
  Box box(kToken, /*seal=*/false);
  TransportOptions opening = box.opening(2);
  opening.seal = false;
  const OpenedTransport opened = open_tcp(opening);
  const auto grant = alloc(*opened.transport, 1, kSize);
  std::vector<std::byte> data = random_bytes(kSize);
  move(*opened.transport, Opcode::kWrite, *grant, 0, data);
  EXPECT_TRUE(same(data, box.handler.segment(1)->block->base()));
}

}  // namespace
}  // namespace hbm::box::transport
