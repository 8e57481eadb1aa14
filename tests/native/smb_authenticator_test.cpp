// Tags of records, and the detection of changed records by a stream.
#include "box/protocol/authenticator.h"

#include <gtest/gtest.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/protocol/proof.h"
#include "expect_error.h"
#include "seeds.h"
#include "smb_socket_pairs.h"

namespace hbm::box::protocol {
namespace {

MacKey random_key() {
  MacKey key;
  std::mt19937_64 random = test_random();
  for (std::byte& one : key) one = std::byte(random());
  return key;
}

// Returns the tag that Authenticator should make. Computes it by another interface of OpenSSL.
Tag gmac(const MacKey& key, uint64_t number, const Bytes& bytes) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data(), &number, sizeof(number));
  char cipher[] = "AES-256-GCM";
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_CIPHER, cipher, 0),
      OSSL_PARAM_construct_octet_string(OSSL_MAC_PARAM_IV, nonce.data(), nonce.size()),
      OSSL_PARAM_construct_end(),
  };
  EVP_MAC* const mac = EVP_MAC_fetch(nullptr, "GMAC", nullptr);
  EVP_MAC_CTX* const context = EVP_MAC_CTX_new(mac);
  Tag tag{};
  size_t length = 0;
  EXPECT_EQ(EVP_MAC_init(context, reinterpret_cast<const unsigned char*>(key.data()), key.size(),
                         parameters),
            1);
  EXPECT_EQ(
      EVP_MAC_update(context, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()),
      1);
  EXPECT_EQ(
      EVP_MAC_final(context, reinterpret_cast<unsigned char*>(tag.data()), &length, tag.size()), 1);
  EXPECT_EQ(length, tag.size());
  EVP_MAC_CTX_free(context);
  EVP_MAC_free(mac);
  return tag;
}

TEST(Authenticator, MatchesTheStandard) {
  // Test case 13 of the GCM specification: no data, and a key and a nonce of zeros.
  constexpr unsigned char kExpected[16] = {0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45, 0x36, 0xb9,
                                           0xa9, 0x63, 0xb4, 0xf1, 0xc4, 0xcb, 0x73, 0x8b};
  const Tag tag = Authenticator(MacKey{}).next_tag({});
  EXPECT_EQ(std::memcmp(tag.data(), kExpected, sizeof(kExpected)), 0);
}

TEST(Authenticator, CountsTheRecords) {
  const MacKey key = random_key();
  Authenticator authenticator(key);
  std::mt19937_64 random = test_random();
  for (uint64_t number = 0; number < 100; ++number) {
    const Bytes bytes = random_bytes(random() % 5000, random());
    EXPECT_EQ(authenticator.next_tag(bytes), gmac(key, number, bytes)) << number;
  }
}

TEST(Authenticator, TakesItsKeysFromTheTokenAndBothNonces) {
  // HKDF-SHA-256 of the token "key" and 64 zeros, by Python's hmac.
  constexpr unsigned char kToBox[32] = {0x45, 0x30, 0xe5, 0x1f, 0xba, 0x46, 0x33, 0x60,
                                        0xb2, 0x18, 0x0b, 0xb3, 0xda, 0x70, 0x2a, 0xc8,
                                        0x57, 0x8a, 0xe0, 0x81, 0x97, 0xf0, 0xc9, 0x27,
                                        0xd1, 0xff, 0xe1, 0x7a, 0xf1, 0xf8, 0x80, 0x36};
  constexpr unsigned char kToClient[32] = {0xe1, 0xf4, 0x35, 0xf1, 0x9b, 0x1b, 0x6c, 0x56,
                                           0xf0, 0x7e, 0xc7, 0xba, 0x69, 0xf2, 0xff, 0xe9,
                                           0x94, 0x13, 0xa3, 0xe1, 0x31, 0xa0, 0x33, 0x3b,
                                           0x83, 0x9d, 0x45, 0x29, 0x2a, 0x83, 0xac, 0xdc};
  const MacKeys keys = mac_keys("key", Hello{}, Join{});
  EXPECT_EQ(std::memcmp(keys.to_box.data(), kToBox, sizeof(kToBox)), 0);
  EXPECT_EQ(std::memcmp(keys.to_client.data(), kToClient, sizeof(kToClient)), 0);

  Hello hello{};
  hello.nonce[31] = std::byte{1};
  EXPECT_NE(mac_keys("key", hello, Join{}).to_box, keys.to_box);
  Join join{};
  join.nonce[0] = std::byte{1};
  EXPECT_NE(mac_keys("key", Hello{}, join).to_box, keys.to_box);
  EXPECT_NE(mac_keys("Key", Hello{}, Join{}).to_client, keys.to_client);
}

class Counter final : public FrameReceiver {
 public:
  int frames = 0;
  int payloads = 0;
  Bytes payload = Bytes(1 << 20);

  const char* check(const Header& header) override { return malformed_reply(header); }
  std::byte* payload_destination(const Header&, std::span<const std::byte>) override {
    ++payloads;
    return payload.data();
  }
  void frame(const Header&, std::span<const std::byte>, Descriptor) override { ++frames; }
};

constexpr MacKey kLeftToRight{std::byte{1}};
constexpr MacKey kRightToLeft{std::byte{2}};

// Returns the records of a stream that sends `frames` frames, each in a record of its own.
std::vector<Bytes> records_of(int frames, size_t payload_bytes) {
  Pair pair = unix_pair();
  FrameStream from(std::move(pair.left));
  from.authenticate(kLeftToRight, kRightToLeft);
  std::vector<Bytes> records;
  for (int i = 0; i < frames; ++i) {
    const Bytes payload = random_bytes(payload_bytes, test_seed());
    from.queue(header_of(i), {}, payload);
    EXPECT_EQ(from.flush(), FrameStream::Flow::kIdle);
    Bytes& record =
        records.emplace_back(sizeof(RecordHeader) + sizeof(Header) + payload_bytes + sizeof(Tag));
    EXPECT_EQ(recv(pair.right.get(), record.data(), record.size(), MSG_WAITALL),
              static_cast<ssize_t>(record.size()));
  }
  return records;
}

// Passes `records` to a stream. Returns the number of frames received before the forgery was
// detected.
int frames_before_forgery(const std::vector<Bytes>& records, Counter& counter,
                          Payloads payloads = Payloads::kPrivate) {
  Pair pair = unix_pair();
  FrameStream to(std::move(pair.right), payloads);
  to.authenticate(kRightToLeft, kLeftToRight);
  for (const Bytes& record : records) {
    EXPECT_EQ(send(pair.left.get(), record.data(), record.size(), 0),
              static_cast<ssize_t>(record.size()));
  }
  bool forged = false;
  try {
    while (to.receive(counter, 1 << 20) == FrameStream::Flow::kMore) {
    }
  } catch (const Forged& error) {
    forged = true;
    EXPECT_NE(std::string(error.what()).find("altered, repeated, left out or reordered"),
              std::string::npos);
  }
  EXPECT_TRUE(forged);
  return counter.frames;
}

TEST(AuthenticatedStream, FindsEveryAlteredByte) {
  const Bytes record = records_of(1, 100).front();
  for (size_t i = sizeof(RecordHeader); i < record.size(); ++i) {
    for (const Payloads payloads : {Payloads::kPrivate, Payloads::kShared}) {
      Bytes altered = record;
      altered[i] ^= std::byte{1};
      Counter counter;
      EXPECT_EQ(frames_before_forgery({altered}, counter, payloads), 0) << i;
      EXPECT_EQ(counter.payloads, 0) << i;
    }
  }
}

TEST(AuthenticatedStream, FindsAnAlteredLength) {
  const std::vector<Bytes> records = records_of(2, 100);
  for (const int bytes : {-1, 1}) {
    std::vector<Bytes> altered = records;
    altered[0][0] = std::byte(std::to_integer<int>(altered[0][0]) + bytes);
    Counter counter;
    EXPECT_EQ(frames_before_forgery(altered, counter), 0);
  }
  std::vector<Bytes> endless = records;
  endless[0][3] = std::byte{0xff};
  Counter counter;
  EXPECT_EQ(frames_before_forgery(endless, counter), 0);
}

TEST(AuthenticatedStream, DetectsRepeatedDroppedAndReorderedRecords) {
  const std::vector<Bytes> records = records_of(4, 100);
  const auto frames = [&](const std::vector<int>& order) {
    std::vector<Bytes> changed;
    for (const int index : order) changed.push_back(records[static_cast<size_t>(index)]);
    Counter counter;
    return frames_before_forgery(changed, counter);
  };
  EXPECT_EQ(frames({0, 1, 1, 2}), 2);
  EXPECT_EQ(frames({0, 2, 3}), 1);
  EXPECT_EQ(frames({1, 0, 2, 3}), 0);
  EXPECT_EQ(frames({0, 1, 2, 0}), 3);
}

TEST(AuthenticatedStream, DetectsItsOwnRecordsSentBack) {
  Pair pair = unix_pair();
  FrameStream from(std::move(pair.left));
  from.authenticate(kLeftToRight, kRightToLeft);
  const Bytes own = records_of(1, 100).front();
  ASSERT_EQ(send(pair.right.get(), own.data(), own.size(), 0), static_cast<ssize_t>(own.size()));
  Counter counter;
  EXPECT_THROW(from.receive(counter, 1 << 20), Forged);
  EXPECT_EQ(counter.frames, 0);
}

TEST(AuthenticatedStream, ChecksALongPayloadRecordByRecord) {
  constexpr size_t kBytes = 1 << 20;
  Pair pair = tcp_pair();
  std::optional<FrameStream> from(std::in_place, std::move(pair.left));
  from->authenticate(kLeftToRight, kRightToLeft);
  const Bytes payload = random_bytes(kBytes, test_seed());
  from->queue(header_of(0), {}, payload);
  Bytes wire;
  for (ssize_t got = 1; got != 0;) {  // to the end of the stream
    if (from && from->flush() == FrameStream::Flow::kIdle) from.reset();
    Bytes part(1 << 20);
    got = recv(pair.right.get(), part.data(), part.size(), from ? MSG_DONTWAIT : 0);
    if (got > 0) wire.insert(wire.end(), part.begin(), part.begin() + got);
  }
  wire[3 * kMostRecordBytes] ^= std::byte{1};  // in the third record

  Pair other = tcp_pair();
  FrameStream to(std::move(other.right));
  to.authenticate(kRightToLeft, kLeftToRight);
  Counter counter;
  std::fill(counter.payload.begin(), counter.payload.end(), std::byte{0x5a});
  const auto pass_on = [&] {
    for (size_t sent = 0; sent < wire.size();) {
      const ssize_t now = send(other.left.get(), wire.data() + sent, wire.size() - sent,
                               MSG_DONTWAIT | MSG_NOSIGNAL);
      if (now > 0) sent += static_cast<size_t>(now);
      to.receive(counter, 1 << 20);
    }
    while (wait_for(to.fd(), POLLIN, std::chrono::steady_clock::now() + std::chrono::seconds(60))) {
      to.receive(counter, 1 << 20);
    }
  };
  EXPECT_THROW(pass_on(), Forged);
  EXPECT_EQ(counter.frames, 0);
  const size_t good = 2 * kMostRecordBytes - sizeof(Header);
  EXPECT_TRUE(std::equal(payload.begin(), payload.begin() + good, counter.payload.begin()));
  EXPECT_EQ(Bytes(counter.payload.begin() + good, counter.payload.end()),
            Bytes(kBytes - good, std::byte{0x5a}));
}

TEST(AuthenticatedStream, SaysWhichVersionsDoNotGoTogether) {
  Pair pair = unix_pair();
  FrameStream to(std::move(pair.right));
  Header header = header_of(0);
  header.version = kVersion - 1;
  ASSERT_EQ(send(pair.left.get(), &header, sizeof(header), 0),
            static_cast<ssize_t>(sizeof(header)));
  Counter counter;
  expect_error(ErrorKind::kNetwork,
               {"version " + std::to_string(kVersion - 1), "version " + std::to_string(kVersion),
                "the same release"},
               [&] { to.receive(counter, 1 << 20); });
}

}  // namespace
}  // namespace hbm::box::protocol
