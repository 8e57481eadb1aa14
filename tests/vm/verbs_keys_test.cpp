// The memory that a client can access over RDMA: its attachments, and nothing before it proves the
// token.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "box/transport/transport.h"
#include "guest/verbs_box.h"
#include "smb_client.h"

namespace hbm::box::verbs {
namespace {

constexpr uint64_t kSize = 8192;
constexpr uint32_t kHandle = 1;
constexpr uint8_t kQueuePairs = 2;

class VerbsKeys : public testing::Test {
 protected:
  static void SetUpTestSuite() { box_.emplace(); }
  static void TearDownTestSuite() { box_.reset(); }

  // Expects that the box still serves other clients.
  ~VerbsKeys() override {
    box::client::ClientOptions options;
    options.url = box_->url();
    options.token = kToken;
    options.transport = box::client::TransportChoice::kVerbs;
    box::client::Client other(options);
    EXPECT_NO_THROW(other.alloc({.size = 1, .key = {}}));
  }

  static protocol::Status refusal_of(RawClient& client, const common::ChallengeMessage& challenge,
                                     const common::CallMessage& call) {
    try {
      client.connect(challenge, call);
    } catch (const transport::Refused& refused) {
      EXPECT_STRNE(refused.what(), "");
      return refused.status();
    }
    return protocol::Status::kOk;
  }

  // A client that has a segment.
  struct Holder {
    Holder() : client(box_->port()) {
      client.connect(kQueuePairs);
      segment = client.alloc(kSize, kHandle);
    }
    RawClient client;
    RawClient::Attached segment;
  };

  static std::optional<BoxProcess> box_;
};

std::optional<BoxProcess> VerbsKeys::box_;

TEST_F(VerbsKeys, OwnSegment) {
  Holder holder;
  ASSERT_EQ(holder.segment.rkeys.size(), kQueuePairs);
  for (uint8_t queue_pair = 0; queue_pair < kQueuePairs; ++queue_pair) {
    const uint64_t last = holder.segment.address + kSize - 8;
    EXPECT_EQ(
        holder.client.write(queue_pair, last, holder.segment.rkeys[queue_pair], 77u + queue_pair),
        IBV_WC_SUCCESS);
    EXPECT_EQ(holder.client.read(queue_pair, last, holder.segment.rkeys[queue_pair]),
              IBV_WC_SUCCESS);
    EXPECT_EQ(holder.client.value(), 77u + queue_pair);
  }
}

TEST_F(VerbsKeys, PastTheEnd) {
  Holder holder;
  const uint64_t end = holder.segment.address + kSize;
  EXPECT_EQ(holder.client.read(0, end - 4, holder.segment.rkeys[0]), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, AKeyWithoutASegment) {
  Holder holder;
  EXPECT_EQ(holder.client.read(0, holder.segment.address, holder.segment.rkeys[0] ^ 1),
            IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, AnotherClientsKey) {
  Holder holder;
  Holder other;
  EXPECT_EQ(other.client.read(0, holder.segment.address, holder.segment.rkeys[0]),
            IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, ReadOnlyAttachment) {
  Holder holder;
  RawClient reader(box_->port());
  reader.connect(kQueuePairs);
  const auto segment = reader.alloc(kSize, kHandle, holder.segment.key, protocol::Alloc::kReadOnly);
  EXPECT_EQ(reader.read(0, segment.address, segment.rkeys[0]), IBV_WC_SUCCESS);
  EXPECT_EQ(reader.write(0, segment.address, segment.rkeys[0], 1), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, ReadOnlyClient) {
  Holder holder;
  RawClient reader(box_->port(), protocol::Join::kReadOnlyClient);
  reader.connect(kQueuePairs);
  const auto segment = reader.alloc(kSize, kHandle, holder.segment.key, protocol::Alloc::kReadOnly);
  EXPECT_EQ(reader.write(1, segment.address, segment.rkeys[1], 1), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, AfterTheAttachmentEnded) {
  Holder holder;
  RawClient other(box_->port());
  other.connect(kQueuePairs);
  const auto segment = other.alloc(kSize, kHandle, holder.segment.key);
  EXPECT_EQ(other.read(0, segment.address, segment.rkeys[0]), IBV_WC_SUCCESS);
  other.free(kHandle);
  EXPECT_EQ(other.read(0, segment.address, segment.rkeys[0]), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, NoQueuePairWithoutAProof) {
  RawClient client(box_->port());
  const common::ChallengeMessage challenge = client.ask();
  common::CallMessage call = client.call(challenge, 0, kQueuePairs);
  call.proof[3] ^= std::byte{1};
  EXPECT_EQ(refusal_of(client, challenge, call), protocol::Status::kDenied);
  call = client.call(challenge, 0, kQueuePairs);
  call.session.low ^= 1;  // another client's session
  EXPECT_EQ(refusal_of(client, challenge, call), protocol::Status::kDenied);
}

TEST_F(VerbsKeys, AProofIsGoodOnce) {
  RawClient client(box_->port());
  const common::ChallengeMessage challenge = client.ask();
  const common::CallMessage call = client.call(challenge, 0, /*queue_pairs=*/1);
  EXPECT_EQ(refusal_of(client, challenge, call), protocol::Status::kOk);
  EXPECT_EQ(refusal_of(client, challenge, call), protocol::Status::kDenied);
}

TEST_F(VerbsKeys, QueuePairsAreBounded) {
  RawClient client(box_->port());
  const common::ChallengeMessage challenge = client.ask();
  EXPECT_EQ(refusal_of(client, challenge, client.call(challenge, 0, 200)),
            protocol::Status::kMalformed);
  EXPECT_EQ(refusal_of(client, challenge, client.call(challenge, 1, kQueuePairs)),
            protocol::Status::kMalformed);
}

TEST_F(VerbsKeys, MalformedMessagesCostTheConnection) {
  {
    RawClient client(box_->port());
    client.connect(kQueuePairs);
    client.send("no header", 9);
    EXPECT_TRUE(client.closed());
  }
  RawClient client(box_->port());
  client.connect(kQueuePairs);
  protocol::Header header;
  header.opcode = protocol::Opcode::kWrite;
  header.body_bytes = sizeof(protocol::Transfer);
  client.send(&header, sizeof(header));
  EXPECT_TRUE(client.closed());
}

TEST_F(VerbsKeys, ForgedMessagesCostTheConnection) {
  protocol::Header ping;
  ping.opcode = protocol::Opcode::kPing;
  {
    RawClient client(box_->port());
    client.connect(kQueuePairs);
    client.send_plain(&ping, sizeof(ping));  // without a tag
    EXPECT_TRUE(client.closed());
  }
  RawClient client(box_->port());
  client.connect(kQueuePairs);
  EXPECT_EQ(client.request(protocol::Opcode::kPing, nullptr, 0).header.status,
            protocol::Status::kOk);
  const std::vector<std::byte> wrong_tag(sizeof(ping) + sizeof(protocol::Tag));
  client.send_plain(wrong_tag.data(), static_cast<uint32_t>(wrong_tag.size()));
  EXPECT_TRUE(client.closed());
}

}  // namespace
}  // namespace hbm::box::verbs

int main(int argc, char** argv) {
  if (hbm::box::verbs::was_box(argc, argv)) return 0;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
