// The messages of an RDMA connection, parsed at both ends without a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "box/server/request_handler.h"
#include "box/verbs/client/remote_segment.h"
#include "box/verbs/client/reply_assembly.h"
#include "box/verbs/common/handshake.h"
#include "box/verbs/common/tuning.h"
#include "box/verbs/server/challenges.h"
#include "box/verbs/server/reply_message.h"
#include "box/verbs/server/request_message.h"
#include "expect_error.h"
#include "seeds.h"

namespace hbm::box::verbs {
namespace {

using protocol::Opcode;
using protocol::Status;
using Message = std::vector<std::byte>;

// The sizes of the bodies of an opcode's request and reply, in bytes. `payload`: the reply has a
// payload.
struct Kind {
  size_t request;
  size_t reply;
  bool payload;
};
const std::map<Opcode, Kind> kKinds{
    {Opcode::kLeave, {0, 0, false}},       {Opcode::kPing, {0, 0, false}},
    {Opcode::kAlloc, {56, 40, true}},      {Opcode::kAttach, {32, 40, true}},
    {Opcode::kFree, {24, 0, false}},       {Opcode::kDelete, {24, 0, false}},
    {Opcode::kAccumulate, {64, 0, false}}, {Opcode::kFetchAdd, {40, 8, false}},
    {Opcode::kStats, {8, 0, true}},        {Opcode::kExists, {16, 8, false}}};

class VerbsMessages : public testing::Test {
 protected:
  Message random_bytes(size_t count) {
    Message bytes(count);
    for (std::byte& one : bytes) one = std::byte(random_());
    return bytes;
  }

  size_t below(size_t bound) { return random_() % bound; }

  static Message message_of(const protocol::Header& header, const Message& rest) {
    Message message(sizeof(header));
    std::memcpy(message.data(), &header, sizeof(header));
    message.insert(message.end(), rest.begin(), rest.end());
    return message;
  }

  std::mt19937_64 random_ = test_random();
};

TEST_F(VerbsMessages, RequestsAreParsed) {
  for (const auto& [opcode, kind] : kKinds) {
    protocol::Header header;
    header.opcode = opcode;
    header.body_bytes = static_cast<uint32_t>(kind.request);
    header.id = random_();
    const Message body = random_bytes(kind.request);
    const Message message = message_of(header, body);
    const server::RequestMessage request = server::parse_request(message);
    EXPECT_EQ(request.header.id, header.id);
    EXPECT_TRUE(std::ranges::equal(request.body, body));
    // The offset of the handle in each body, by docs/design/wire-protocol.md.
    const std::map<Opcode, size_t> handles{
        {Opcode::kAlloc, 40}, {Opcode::kAttach, 24}, {Opcode::kFree, 16}};
    uint32_t handle = 0;
    if (handles.contains(opcode)) std::memcpy(&handle, &body[handles.at(opcode)], sizeof(handle));
    EXPECT_EQ(request.handle, handle) << protocol::opcode_name(opcode);
    for (size_t bytes = 0; bytes < message.size(); ++bytes) {
      EXPECT_THROW(server::parse_request(std::span(message).first(bytes)), Error);
    }
  }
}

TEST_F(VerbsMessages, OnlyRequestsAreAccepted) {
  for (int round = 0; round < 20'000; ++round) {
    protocol::Header header;
    header.opcode = static_cast<Opcode>(below(20));
    const auto kind = kKinds.find(header.opcode);
    const size_t usual = kind == kKinds.end() ? 16 : kind->second.request;
    header.body_bytes = static_cast<uint32_t>(below(4) == 0 ? below(300) : usual);
    if (below(8) == 0) header.payload_bytes = static_cast<uint32_t>(below(3));
    if (below(8) == 0) header.status = static_cast<Status>(below(3));
    if (below(16) == 0) header.version = static_cast<uint8_t>(below(protocol::kVersion + 2));
    if (below(16) == 0) header.magic ^= 1u << below(32);
    const size_t rest = below(8) == 0 ? below(300) : header.body_bytes;
    const bool good = kind != kKinds.end() && header.body_bytes == usual &&
                      header.payload_bytes == 0 && header.status == Status::kOk &&
                      header.version == protocol::kVersion && header.magic == protocol::kMagic &&
                      rest == usual;
    const Message message = message_of(header, random_bytes(rest));
    if (good) {
      EXPECT_EQ(server::parse_request(message).body.size(), usual);
    } else {
      EXPECT_THROW(server::parse_request(message), Error);
    }
  }
}

// A request and the reply that a box gives to it.
struct Asked {
  transport::TransportRequest request;
  Message body;
  Message payload;
  Message frame;
};

class VerbsReplies : public VerbsMessages, public testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { connect(); }

  void connect() {
    assembly_.emplace();
    asked_.clear();
    if (!GetParam()) return;
    protocol::MacKey key;
    for (std::byte& one : key) one = std::byte(random_());
    assembly_->authenticate(key);
    sender_.emplace(key);
  }

  void ask() {
    const auto kind = std::next(kKinds.begin(), static_cast<long>(below(kKinds.size())));
    Asked& asked = *asked_.emplace_back(std::make_unique<Asked>());
    asked.request.opcode = kind->first;
    protocol::Header header;
    header.opcode = kind->first;
    header.id = assembly_->expect(asked.request);
    const bool good = below(4) != 0;
    header.status = good ? Status::kOk : static_cast<Status>(1 + below(13));
    if (good) asked.body = random_bytes(kind->second.reply);
    if (!good || kind->second.payload) asked.payload = random_bytes(below(20'000));
    header.body_bytes = static_cast<uint32_t>(asked.body.size());
    header.payload_bytes = static_cast<uint32_t>(asked.payload.size());
    Message rest = asked.body;
    rest.insert(rest.end(), asked.payload.begin(), asked.payload.end());
    asked.frame = message_of(header, rest);
  }

  transport::TransportRequest* send(std::span<const std::byte> part) {
    Message message(part.begin(), part.end());
    if (sender_) {
      const protocol::Tag tag = sender_->next_tag(message);
      message.insert(message.end(), tag.begin(), tag.end());
    }
    return assembly_->take(message);
  }

  std::optional<protocol::Authenticator> sender_;
  std::optional<client::ReplyAssembly> assembly_;
  std::vector<std::unique_ptr<Asked>> asked_;
};

TEST_P(VerbsReplies, ReachRequestsInAnyOrderAndParts) {
  for (int i = 0; i < 300; ++i) ask();
  std::ranges::shuffle(asked_, random_);
  for (const auto& asked : asked_) {
    transport::TransportRequest* answered = nullptr;
    std::span<const std::byte> left(asked->frame);
    while (!left.empty()) {
      ASSERT_EQ(answered, nullptr) << "before its reply was whole";
      const size_t least = left.size() == asked->frame.size() ? sizeof(protocol::Header) : 1;
      const auto part = left.first(std::min(left.size(), least + below(4096)));
      answered = send(part);
      left = left.subspan(part.size());
    }
    ASSERT_EQ(answered, &asked->request);
    EXPECT_EQ(answered->reply, asked->body);
    const bool good = answered->status == Status::kOk;
    const auto cause = std::as_bytes(std::span(answered->cause));
    EXPECT_TRUE(std::ranges::equal(good ? std::span<const std::byte>(answered->payload) : cause,
                                   asked->payload));
  }
  EXPECT_TRUE(assembly_->idle());
}

TEST_P(VerbsReplies, UnexpectedRepliesBreakTheConnection) {
  for (int round = 0; round < 2'000; ++round) {
    connect();
    ask();
    Message frame = asked_.front()->frame;
    protocol::Header header;
    std::memcpy(&header, frame.data(), sizeof(header));
    const size_t wrong = below(6);
    if (wrong == 0) header.id += 1 + below(5);
    if (wrong == 1) header.opcode = header.opcode == Opcode::kPing ? Opcode::kFree : Opcode::kPing;
    if (wrong == 2) header.body_bytes += 1;
    if (wrong == 3) header.status = static_cast<Status>(14 + below(100));
    if (wrong == 4) frame.push_back({});
    if (wrong == 5) frame.resize(below(sizeof(header)));
    if (wrong < 5) std::memcpy(frame.data(), &header, sizeof(header));
    EXPECT_THROW(send(frame), transport::Broken) << "wrong: " << wrong;
  }
}

TEST_P(VerbsReplies, SendTheFirst64KiBOfACause) {
  constexpr size_t kMost = 64 << 10;
  for (const size_t bytes : {size_t{0}, below(kMost), kMost, kMost + 1, kMost + below(kMost)}) {
    connect();
    transport::TransportRequest request;
    request.opcode = Opcode::kAlloc;
    const std::string cause(bytes, static_cast<char>('a' + below(26)));
    const box::server::Reply refused = box::server::refused(Status::kExhausted, cause);
    const Message frame =
        server::reply_message(assembly_->expect(request), Opcode::kAlloc, refused);
    ASSERT_EQ(send(frame), &request);
    EXPECT_EQ(request.status, Status::kExhausted);
    EXPECT_EQ(request.cause, cause.substr(0, kMost));
  }
}

TEST_P(VerbsReplies, CutNoCharacterOfACause) {
  constexpr size_t kMost = 64 << 10;
  for (const std::string character : {"\u00e9", "\u20ac", "\U0001f600"}) {
    for (size_t before = 0; before < character.size(); ++before) {
      std::string cause(before, 'a');
      while (cause.size() <= kMost) cause += character;
      connect();
      transport::TransportRequest request;
      request.opcode = Opcode::kAlloc;
      const box::server::Reply refused = box::server::refused(Status::kExhausted, cause);
      send(server::reply_message(assembly_->expect(request), Opcode::kAlloc, refused));
      const size_t whole = kMost - (kMost - before) % character.size();
      EXPECT_EQ(request.cause, cause.substr(0, whole));
    }
  }
}

TEST_P(VerbsReplies, ALongerCauseBreaksTheConnection) {
  transport::TransportRequest request;
  request.opcode = Opcode::kFree;
  protocol::Header header;
  header.opcode = Opcode::kFree;
  header.status = Status::kNotAttached;
  header.id = assembly_->expect(request);
  header.payload_bytes = (64 << 10) + 1;
  EXPECT_THROW(send(message_of(header, {})), transport::Broken);
}

TEST_P(VerbsReplies, SecondReplyBreaksTheConnection) {
  ask();
  send(asked_.front()->frame);
  EXPECT_THROW(send(asked_.front()->frame), transport::Broken);
}

INSTANTIATE_TEST_SUITE_P(Verbs, VerbsReplies, testing::Bool(), [](const auto& each) {
  return std::string(each.param ? "authenticated" : "plain");
});

TEST_F(VerbsMessages, UnexpectedTagBreaksTheConnection) {
  protocol::MacKey key{};
  client::ReplyAssembly assembly;
  assembly.authenticate(key);
  EXPECT_THROW(assembly.take(random_bytes(100)), transport::Broken);
  EXPECT_THROW(assembly.take(random_bytes(3)), transport::Broken);
}

TEST_F(VerbsMessages, ASegmentHasAKeyForEachQueuePair) {
  for (size_t queue_pairs = 1; queue_pairs <= 16; ++queue_pairs) {
    transport::TransportRequest request;
    const protocol::Allocated allocated{{1, 2}, random_(), 1, 0, random_()};
    request.reply.resize(sizeof(allocated));
    std::memcpy(request.reply.data(), &allocated, sizeof(allocated));
    request.payload = random_bytes(queue_pairs * sizeof(uint32_t));
    const client::RemoteSegment segment = client::granted_segment(request, queue_pairs);
    EXPECT_EQ(segment.address, allocated.address);
    EXPECT_EQ(segment.size, allocated.size);
    EXPECT_EQ(std::memcmp(segment.rkeys.data(), request.payload.data(), request.payload.size()), 0);
    EXPECT_THROW(client::granted_segment(request, queue_pairs + 1), transport::Broken);
    request.reply.pop_back();
    EXPECT_THROW(client::granted_segment(request, queue_pairs), transport::Broken);
  }
}

// The handshake.

common::CallMessage call(const common::ChallengeMessage& challenge, uint32_t queue_pair,
                         uint32_t queue_pairs) {
  common::CallMessage made{};
  made.magic = common::CallMessage::kMagic;
  made.challenge_id = challenge.challenge_id;
  made.queue_pair = static_cast<uint8_t>(queue_pair);
  made.queue_pairs = static_cast<uint8_t>(queue_pairs);
  if (challenge.hello.authenticated != 0) made.flags = protocol::Join::kAuthenticated;
  return made;
}

void expect_refused(Status status, server::Challenges& challenges,
                    const common::CallMessage& call) {
  try {
    challenges.met_by(call);
    ADD_FAILURE() << "it was let in";
  } catch (const box::server::Refusal& refusal) {
    EXPECT_EQ(refusal.status(), status) << refusal.what();
  }
}

TEST(VerbsChallenges, AdmitEachQueuePairOnceAndInOrder) {
  server::Challenges challenges("", /*seal=*/true, /*max_queue_pairs=*/4);
  for (uint32_t queue_pairs = 1; queue_pairs <= 4; ++queue_pairs) {
    const common::ChallengeMessage challenge = challenges.issue();
    EXPECT_EQ(challenge.hello.token_required, 0u);
    for (uint32_t queue_pair = 0; queue_pair < queue_pairs; ++queue_pair) {
      for (uint32_t other = 0; other < 6; ++other) {
        if (other == queue_pair) continue;
        expect_refused(Status::kMalformed, challenges, call(challenge, other, queue_pairs));
      }
      challenges.met_by(call(challenge, queue_pair, queue_pairs));
      challenges.admitted(call(challenge, queue_pair, queue_pairs));
    }
    expect_refused(Status::kDenied, challenges, call(challenge, 0, queue_pairs));
  }
  expect_refused(Status::kMalformed, challenges, call(challenges.issue(), 0, 5));
}

// The first call announces a number of queue pairs, and the box reserves room for them. A later
// call must not announce another number.
TEST(VerbsChallenges, AClientKeepsToItsNumberOfQueuePairs) {
  server::Challenges challenges("", /*seal=*/true, /*max_queue_pairs=*/16);
  const common::ChallengeMessage challenge = challenges.issue();
  challenges.admitted(call(challenge, 0, 2));
  expect_refused(Status::kMalformed, challenges, call(challenge, 1, 16));
  challenges.met_by(call(challenge, 1, 2));
}

TEST(VerbsChallenges, AskForTheToken) {
  const std::string token = "sesame";
  server::Challenges challenges(token, /*seal=*/true, /*max_queue_pairs=*/4);
  const common::ChallengeMessage challenge = challenges.issue();
  EXPECT_EQ(challenge.hello.token_required, 1u);
  EXPECT_EQ(challenge.hello.authenticated, 1u);
  common::CallMessage proved = call(challenge, 0, 2);
  prove(proved, token, challenge.hello);
  challenges.met_by(proved);
  challenges.admitted(proved);

  common::CallMessage guessed = call(challenge, 1, 2);
  prove(guessed, "guess", challenge.hello);
  expect_refused(Status::kDenied, challenges, guessed);
  prove(guessed, token, challenge.hello);  // the refused call has ended the challenge
  expect_refused(Status::kDenied, challenges, guessed);
}

TEST(VerbsChallenges, BothEndsAuthenticateOrNeither) {
  const std::string token = "sesame";
  for (const bool seal : {false, true}) {
    server::Challenges challenges(token, seal, /*max_queue_pairs=*/4);
    const common::ChallengeMessage challenge = challenges.issue();
    common::CallMessage other = call(challenge, 0, 1);
    other.flags ^= protocol::Join::kAuthenticated;
    prove(other, token, challenge.hello);
    expect_refused(Status::kUnsupported, challenges, other);
  }
}

TEST(VerbsChallenges, OldestIsDropped) {
  server::Challenges challenges("", /*seal=*/true, /*max_queue_pairs=*/4);
  const common::ChallengeMessage first = challenges.issue();
  const common::ChallengeMessage second = challenges.issue();
  for (size_t i = 2; i <= common::kMostChallenges; ++i) challenges.issue();
  expect_refused(Status::kDenied, challenges, call(first, 0, 1));
  challenges.met_by(call(second, 0, 1));
}

TEST(WholeCharacters, AreLeftOfAText) {
  EXPECT_EQ(protocol::whole_characters("", 0), "");
  EXPECT_EQ(protocol::whole_characters("\u20ac", 3), "\u20ac");
  EXPECT_EQ(protocol::whole_characters("\u20ac", 2), "");
  EXPECT_EQ(protocol::whole_characters("a\u20acb", 3), "a");
  EXPECT_EQ(protocol::whole_characters("a\u20acb", 4), "a\u20ac");
  const std::string no_text(9, '\x80');
  EXPECT_EQ(protocol::whole_characters(no_text, 7), no_text.substr(2));
}

TEST(VerbsHandshake, ARefusalCutsNoCharacter) {
  std::string cause(136, 'x');
  EXPECT_EQ(cause_of(common::refusal(Status::kDenied, cause + "\u00e9")), cause);
}

TEST(VerbsHandshake, ARefusalNeedsNoEnd) {
  const common::RefusalMessage sent = common::refusal(Status::kDenied, std::string(300, 'x'));
  EXPECT_EQ(cause_of(sent), std::string(137, 'x'));
  common::RefusalMessage endless = sent;
  std::ranges::fill(endless.cause, 'y');
  EXPECT_EQ(cause_of(endless), std::string(138, 'y'));
}

}  // namespace
}  // namespace hbm::box::verbs
