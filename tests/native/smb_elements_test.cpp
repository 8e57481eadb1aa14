// A frame stream moves payloads into and out of shared memory without tearing elements.
#include "box/protocol/elements.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "seeds.h"
#include "smb_socket_pairs.h"

namespace hbm::box::protocol {
namespace {

using Flow = FrameStream::Flow;

constexpr uint64_t kOnes = ~uint64_t{0};

// Elements whose bits are all 0 or all 1. An element with other bits is torn.
class Elements {
 public:
  explicit Elements(size_t count) : values_(count) {}

  std::byte* bytes() { return reinterpret_cast<std::byte*>(values_.data()); }
  void fill(uint64_t value) { std::ranges::fill(values_, value); }
  // Returns the number of torn elements entirely inside these bytes.
  ptrdiff_t torn(size_t begin, size_t end) const {
    return std::count_if(values_.begin() + static_cast<ptrdiff_t>((begin + 7) / 8),
                         values_.begin() + static_cast<ptrdiff_t>(end / 8),
                         [](uint64_t value) { return value != 0 && value != kOnes; });
  }

 private:
  std::vector<uint64_t> values_;
};

class Destination : public FrameReceiver {
 public:
  explicit Destination(std::byte* destination) : destination_(destination) {}
  int frames = 0;

  const char* check(const Header& header) override { return malformed_reply(header); }
  std::byte* payload_destination(const Header&, std::span<const std::byte>) override {
    return destination_;
  }
  void frame(const Header&, std::span<const std::byte>, Descriptor) override { ++frames; }

 private:
  std::byte* const destination_;
};

class SharedMemory : public testing::TestWithParam<Pair (*)()> {};

INSTANTIATE_TEST_SUITE_P(Sockets, SharedMemory, testing::Values(&unix_pair, &tcp_pair),
                         [](const auto& info) { return info.index == 0 ? "Unix" : "Tcp"; });

TEST_P(SharedMemory, HasNoTornElement) {
  constexpr size_t kElements = 8192;
  for (const size_t begin : {0, 4, 5}) {
    for (const size_t chunk : {1, 12, 20'001}) {
      const size_t end = begin + (chunk == 1 ? 100 : 8 * kElements - 11);
      auto [left, right] = GetParam()();
      FrameStream to(std::move(right), Payloads::kShared);
      Elements memory(kElements);
      Destination destination(memory.bytes() + begin);
      Bytes wire(sizeof(Header) + end - begin, std::byte{0xFF});
      Header header = header_of(0);
      header.payload_bytes = static_cast<uint32_t>(end - begin);
      std::memcpy(wire.data(), &header, sizeof(header));
      for (size_t sent = 0; sent < wire.size(); sent += std::min(chunk, wire.size() - sent)) {
        const size_t bytes = std::min(chunk, wire.size() - sent);
        ASSERT_EQ(send(left.get(), wire.data() + sent, bytes, 0), static_cast<ssize_t>(bytes));
        while (wait_for(to.fd(), POLLIN, {})) {
          ASSERT_EQ(to.receive(destination, 1 << 20), Flow::kIdle);
          ASSERT_EQ(memory.torn(begin, end), 0) << begin << ", after " << sent + bytes;
        }
      }
      while (destination.frames == 0) {
        ASSERT_TRUE(
            wait_for(to.fd(), POLLIN, std::chrono::steady_clock::now() + std::chrono::seconds(60)));
        to.receive(destination, 1 << 20);
      }
      Bytes expected(8 * kElements);
      std::fill_n(expected.begin() + static_cast<ptrdiff_t>(begin), end - begin, std::byte{0xFF});
      EXPECT_EQ(std::memcmp(memory.bytes(), expected.data(), expected.size()), 0);
    }
  }
}

TEST_P(SharedMemory, IsSentWithoutMixingElements) {
  constexpr size_t kElements = kMaxPayload / 8;
  // The bytes before the payload. Their number is odd, so a cut of the stream at a multiple of 8
  // bytes is inside an element.
  constexpr size_t kHead = sizeof(Header) + 3;
  auto [left, right] = GetParam()();
  const int buffer_bytes = 50'000;
  ASSERT_EQ(setsockopt(left.get(), SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes)), 0);
  FrameStream from(std::move(left), Payloads::kShared);
  Elements memory(kElements);
  const Bytes body(3);
  from.queue(header_of(0), body, {memory.bytes(), kMaxPayload});
  Bytes wire(kHead + kMaxPayload);
  size_t received = 0;
  for (uint64_t turn = 1; received < wire.size(); ++turn) {
    ASSERT_LT(turn, 10'000U);
    ASSERT_NE(from.flush(), Flow::kClosed);
    memory.fill(turn % 2 == 0 ? 0 : kOnes);
    const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    if (!wait_for(right.get(), POLLIN, soon)) continue;  // the kernel may report free space late
    const ssize_t got = recv(right.get(), wire.data() + received,
                             std::min<size_t>(wire.size() - received, 20'001), MSG_DONTWAIT);
    ASSERT_GT(got, 0);
    received += static_cast<size_t>(got);
  }
  EXPECT_EQ(from.queued_bytes(), 0U);
  Elements sent(kElements);
  std::memcpy(sent.bytes(), wire.data() + kHead, kMaxPayload);
  EXPECT_EQ(sent.torn(0, kMaxPayload), 0);
}

// Vector instructions copy up to some cache lines. In shared memory, the copies begin and end at
// all offsets in a line.
TEST(SharedElements, AreCopiedAtEveryAlignment) {
  constexpr size_t kSize = 320;
  const Bytes source = random_bytes(kSize, test_seed());
  alignas(64) std::array<std::byte, kSize> shared;
  alignas(64) std::array<std::byte, kSize> back;
  for (const Stores stores : {Stores::kCached, Stores::kNonTemporal}) {
    for (const size_t own : {0, 1, 8, 16}) {
      for (size_t begin = 0; begin < 72; ++begin) {
        for (size_t bytes = 0; bytes < 200; ++bytes) {
          shared.fill(std::byte{0xA5});
          std::array<std::byte, kSize> expected = shared;
          std::copy_n(source.begin() + own, bytes, expected.begin() + begin);
          store_elements(shared.data() + begin, source.data() + own, bytes, stores);
          ASSERT_EQ(shared, expected) << bytes << " at " << begin << " from " << own;
          back.fill(std::byte{0x5A});
          std::array<std::byte, kSize> expected_back = back;
          std::copy_n(source.begin() + own, bytes, expected_back.begin() + own);
          load_elements(back.data() + own, shared.data() + begin, bytes, stores);
          ASSERT_EQ(back, expected_back) << bytes << " at " << begin << " to " << own;
        }
      }
    }
  }
}

TEST(SharedElements, AreNotCutAtTheEndOfAPart) {
  alignas(8) std::array<std::byte, 64> shared{};
  for (size_t begin = 0; begin < 16; ++begin) {
    for (size_t bytes = 0; bytes < 40; ++bytes) {
      EXPECT_EQ(uncut_bytes(shared.data() + begin, bytes, bytes), bytes);
      const size_t uncut = uncut_bytes(shared.data() + begin, bytes, 40);
      EXPECT_LE(uncut, bytes);
      EXPECT_LT(bytes - uncut, 8U);
      EXPECT_TRUE(uncut == 0 || (begin + uncut) % 8 == 0);
    }
  }
}

}  // namespace
}  // namespace hbm::box::protocol
