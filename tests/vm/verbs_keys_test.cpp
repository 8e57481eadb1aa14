// The memory that a client can reach over RDMA: what it has attached, and nothing before it proves
// the token.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "box/transport/transport.h"
#include "guest/verbs_box.h"
#include "smb_client.h"

namespace hbm::verbs {
namespace {

constexpr uint64_t kSize = 8192;
constexpr uint32_t kHandle = 1;
constexpr uint8_t kLanes = 2;

class VerbsKeys : public testing::Test {
 protected:
  static void SetUpTestSuite() { box_.emplace(); }
  static void TearDownTestSuite() { box_.reset(); }

  // The box still serves others.
  ~VerbsKeys() override {
    client::ClientOptions options;
    options.url = box_->url();
    options.token = kToken;
    options.transport = client::TransportChoice::kVerbs;
    client::Client other(options);
    EXPECT_NO_THROW(other.alloc({.size = 1, .key = {}}));
  }

  static smb::Status refusal_of(RawClient& client, const ChallengeMessage& challenge,
                                const CallMessage& call) {
    try {
      client.connect(challenge, call);
    } catch (const transport::Refused& refused) {
      EXPECT_STRNE(refused.what(), "");
      return refused.status();
    }
    return smb::Status::kOk;
  }

  // A client with a segment, and what became of one access by another.
  struct Holder {
    Holder() : client(box_->port()) {
      client.connect(kLanes);
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
  ASSERT_EQ(holder.segment.rkeys.size(), kLanes);
  for (uint8_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t last = holder.segment.address + kSize - 8;
    EXPECT_EQ(holder.client.write(lane, last, holder.segment.rkeys[lane], 77u + lane),
              IBV_WC_SUCCESS);
    EXPECT_EQ(holder.client.read(lane, last, holder.segment.rkeys[lane]), IBV_WC_SUCCESS);
    EXPECT_EQ(holder.client.value(), 77u + lane);
  }
}

TEST_F(VerbsKeys, PastTheEnd) {
  Holder holder;
  const uint64_t end = holder.segment.address + kSize;
  EXPECT_EQ(holder.client.read(0, end - 4, holder.segment.rkeys[0]), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, AKeyThatNobodyHas) {
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
  reader.connect(kLanes);
  const auto segment = reader.alloc(kSize, kHandle, holder.segment.key, smb::Alloc::kReadOnly);
  EXPECT_EQ(reader.read(0, segment.address, segment.rkeys[0]), IBV_WC_SUCCESS);
  EXPECT_EQ(reader.write(0, segment.address, segment.rkeys[0], 1), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, ReadOnlyClient) {
  Holder holder;
  RawClient reader(box_->port(), smb::Join::kReadOnlyClient);
  reader.connect(kLanes);
  const auto segment = reader.alloc(kSize, kHandle, holder.segment.key, smb::Alloc::kReadOnly);
  EXPECT_EQ(reader.write(1, segment.address, segment.rkeys[1], 1), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, AfterTheAttachmentEnded) {
  Holder holder;
  RawClient other(box_->port());
  other.connect(kLanes);
  const auto segment = other.alloc(kSize, kHandle, holder.segment.key);
  EXPECT_EQ(other.read(0, segment.address, segment.rkeys[0]), IBV_WC_SUCCESS);
  other.free(kHandle);
  EXPECT_EQ(other.read(0, segment.address, segment.rkeys[0]), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(VerbsKeys, NoQueuePairWithoutAProof) {
  RawClient client(box_->port());
  const ChallengeMessage challenge = client.ask();
  CallMessage call = client.call(challenge, 0, kLanes);
  call.proof[3] ^= std::byte{1};
  EXPECT_EQ(refusal_of(client, challenge, call), smb::Status::kDenied);
  call = client.call(challenge, 0, kLanes);
  call.session.low ^= 1;  // somebody else's
  EXPECT_EQ(refusal_of(client, challenge, call), smb::Status::kDenied);
}

TEST_F(VerbsKeys, AProofIsGoodOnce) {
  RawClient client(box_->port());
  const ChallengeMessage challenge = client.ask();
  const CallMessage call = client.call(challenge, 0, /*lanes=*/1);
  EXPECT_EQ(refusal_of(client, challenge, call), smb::Status::kOk);
  EXPECT_EQ(refusal_of(client, challenge, call), smb::Status::kDenied);
}

TEST_F(VerbsKeys, LanesAreBounded) {
  RawClient client(box_->port());
  const ChallengeMessage challenge = client.ask();
  EXPECT_EQ(refusal_of(client, challenge, client.call(challenge, 0, 200)), smb::Status::kMalformed);
  EXPECT_EQ(refusal_of(client, challenge, client.call(challenge, 1, kLanes)),
            smb::Status::kMalformed);
}

TEST_F(VerbsKeys, MalformedMessagesCostTheConnection) {
  {
    RawClient client(box_->port());
    client.connect(kLanes);
    client.send("no header", 9);
    EXPECT_TRUE(client.closed());
  }
  RawClient client(box_->port());
  client.connect(kLanes);
  smb::Header header;
  header.opcode = smb::Opcode::kWrite;
  header.body_bytes = sizeof(smb::Transfer);
  client.send(&header, sizeof(header));
  EXPECT_TRUE(client.closed());
}

TEST_F(VerbsKeys, ForgedMessagesCostTheConnection) {
  smb::Header ping;
  ping.opcode = smb::Opcode::kPing;
  {
    RawClient client(box_->port());
    client.connect(kLanes);
    client.send_plain(&ping, sizeof(ping));  // without a tag
    EXPECT_TRUE(client.closed());
  }
  RawClient client(box_->port());
  client.connect(kLanes);
  EXPECT_EQ(client.request(smb::Opcode::kPing, nullptr, 0).header.status, smb::Status::kOk);
  const std::vector<std::byte> wrong_tag(sizeof(ping) + sizeof(smb::Tag));
  client.send_plain(wrong_tag.data(), static_cast<uint32_t>(wrong_tag.size()));
  EXPECT_TRUE(client.closed());
}

}  // namespace
}  // namespace hbm::verbs

int main(int argc, char** argv) {
  if (hbm::verbs::was_box(argc, argv)) return 0;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
