#include "box/protocol/proof.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

namespace hbm::box::protocol {
namespace {

struct Conversation {
  Hello hello{};
  Join join{};
  Joined joined{};
};

Conversation conversation() {
  Conversation all;
  all.hello.nonce = random_nonce();
  all.join.nonce = random_nonce();
  all.join.session = {1, 2};
  all.joined.session = {1, 2};
  all.joined.generation = {3, 4};
  return all;
}

TEST(Proof, MatchesTheStandard) {
  // HMAC-SHA-256 of "hbm box client" and 88 zeros under the key "key", by Python's hmac.
  constexpr unsigned char kExpected[32] = {0xd9, 0xae, 0xd9, 0xae, 0xcc, 0x4c, 0xbb, 0xff,
                                           0xc0, 0x44, 0x68, 0x48, 0x31, 0x40, 0x22, 0xd4,
                                           0x63, 0x10, 0xbd, 0x7c, 0xe9, 0xab, 0x92, 0x72,
                                           0x9e, 0x9d, 0xd0, 0x6f, 0x49, 0x1d, 0x81, 0x23};
  const Proof proof = client_proof("key", Hello{}, Join{});
  EXPECT_EQ(std::memcmp(proof.data(), kExpected, sizeof(kExpected)), 0);
}

TEST(Proof, IsTheSameForTheSameFrames) {
  const auto [hello, join, joined] = conversation();
  EXPECT_TRUE(equal(client_proof("token", hello, join), client_proof("token", hello, join)));
  EXPECT_TRUE(equal(server_proof("token", hello, join, joined),
                    server_proof("token", hello, join, joined)));
}

TEST(Proof, DiffersBetweenTheEnds) {
  const auto [hello, join, joined] = conversation();
  EXPECT_FALSE(
      equal(client_proof("token", hello, join), server_proof("token", hello, join, joined)));
}

TEST(Proof, DependsOnEveryField) {
  const Conversation all = conversation();
  const Proof client = client_proof("token", all.hello, all.join);
  EXPECT_FALSE(equal(client, client_proof("Token", all.hello, all.join)));
  Conversation other = all;
  other.hello.nonce[31] ^= std::byte{1};
  EXPECT_FALSE(equal(client, client_proof("token", other.hello, other.join)));
  other = all;
  other.join.nonce[0] ^= std::byte{1};
  EXPECT_FALSE(equal(client, client_proof("token", other.hello, other.join)));
  other = all;
  other.join.session.low ^= 1;
  EXPECT_FALSE(equal(client, client_proof("token", other.hello, other.join)));
  other = all;
  other.join.flags ^= Join::kReadOnlyClient;
  EXPECT_FALSE(equal(client, client_proof("token", other.hello, other.join)));
  other = all;
  other.join.pid ^= 1;
  EXPECT_FALSE(equal(client, client_proof("token", other.hello, other.join)));

  const Proof server = server_proof("token", all.hello, all.join, all.joined);
  other = all;
  other.joined.generation.high ^= 1;
  EXPECT_FALSE(equal(server, server_proof("token", other.hello, other.join, other.joined)));
  other = all;
  other.joined.session.high ^= 1;
  EXPECT_FALSE(equal(server, server_proof("token", other.hello, other.join, other.joined)));
}

TEST(Proof, IsZeroWithoutAToken) {
  const auto [hello, join, joined] = conversation();
  EXPECT_TRUE(equal(client_proof("", hello, join), Proof{}));
  EXPECT_TRUE(equal(server_proof("", hello, join, joined), Proof{}));
}

TEST(Proof, ComparisonDetectsEveryDifference) {
  const Proof one = client_proof("token", Hello{}, Join{});
  for (size_t i = 0; i < one.size(); ++i) {
    Proof other = one;
    other[i] ^= std::byte{0x80};
    EXPECT_FALSE(equal(one, other));
  }
}

TEST(Random, DoesNotRepeat) {
  std::set<Nonce> nonces;
  std::set<Id> ids;
  for (int i = 0; i < 100; ++i) {
    nonces.insert(random_nonce());
    ids.insert(random_id());
  }
  EXPECT_EQ(nonces.size(), 100U);
  EXPECT_EQ(ids.size(), 100U);
}

}  // namespace
}  // namespace hbm::box::protocol
