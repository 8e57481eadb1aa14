#include "box/protocol/frame_stream.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "box/protocol/socket.h"
#include "expect_error.h"
#include "scratch.h"
#include "seeds.h"
#include "smb_socket_pairs.h"

namespace hbm::box::protocol {
namespace {

using Flow = FrameStream::Flow;

struct Got {
  Header header;
  Bytes body;
  Bytes payload;
  Descriptor descriptor;
};

class Collector : public FrameReceiver {
 public:
  std::vector<Got> frames;
  std::function<void()> on_frame = [] {};
  bool drops = false;  // true to drop payloads

  const char* check(const Header& header) override { return malformed_reply(header); }

  std::byte* payload_destination(const Header& header, std::span<const std::byte>) override {
    if (drops) return nullptr;
    payload_.resize(header.payload_bytes);
    return payload_.data();
  }

  void frame(const Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override {
    frames.push_back(
        {header, {body.begin(), body.end()}, std::move(payload_), std::move(descriptor)});
    payload_.clear();
    on_frame();
  }

 private:
  Bytes payload_;
};

Deadline in_a_minute() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// Moves the queued frames of `from` until `count` frames have arrived, or no frame arrives for a
// minute. It must wait, because the kernel delivers over TCP some time after send() has returned,
// even on loopback.
void pump(FrameStream& from, FrameStream& to, Collector& collector, size_t count,
          uint64_t most = 1 << 20) {
  while (collector.frames.size() < count) {
    const Flow sent = from.flush();
    const Flow received = to.receive(collector, most);
    if (sent != Flow::kIdle || received != Flow::kIdle || collector.frames.size() >= count)
      continue;
    if (!wait_for(to.fd(), POLLIN, in_a_minute())) return;
  }
}

// The contents of a frame.
struct Expected {
  Bytes body;
  Bytes payload;
};

std::vector<Expected> random_frames(size_t count) {
  std::mt19937_64 random = test_random();
  std::vector<Expected> frames;
  for (size_t i = 0; i < count; ++i) {
    const size_t most = std::array<size_t, 5>{0, 100, 5000, 100'000, kMaxPayload}[random() % 5];
    frames.push_back({random_bytes(random() % (kMaxBody + 1), random()),
                      random_bytes(most == 0 ? 0 : random() % (most + 1), random())});
  }
  return frames;
}

void expect_same(const std::vector<Got>& got, const std::vector<Expected>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].header.id, i);
    EXPECT_TRUE(got[i].body == expected[i].body) << i;
    EXPECT_TRUE(got[i].payload == expected[i].payload) << i;
  }
}

std::string name_of(Payloads payloads) { return payloads == Payloads::kPrivate ? "Own" : "Shared"; }

enum class Authenticated { kNo, kYes };

class FrameStreams
    : public testing::TestWithParam<std::tuple<Pair (*)(), Payloads, Authenticated>> {
 protected:
  static Pair pair() { return std::get<0>(GetParam())(); }
  static Payloads payloads() { return std::get<1>(GetParam()); }
  static bool authenticated() { return std::get<2>(GetParam()) == Authenticated::kYes; }

  // Authenticates the left end of a pair; the function below, the right end.
  static void authenticate_left(FrameStream& stream) {
    if (authenticated()) stream.authenticate(kLeftToRight, kRightToLeft);
  }
  static void authenticate_right(FrameStream& stream) {
    if (authenticated()) stream.authenticate(kRightToLeft, kLeftToRight);
  }

  static constexpr MacKey kLeftToRight{std::byte{1}};
  static constexpr MacKey kRightToLeft{std::byte{2}};
};

INSTANTIATE_TEST_SUITE_P(Sockets, FrameStreams,
                         testing::Combine(testing::Values(&unix_pair, &tcp_pair),
                                          testing::Values(Payloads::kPrivate, Payloads::kShared),
                                          testing::Values(Authenticated::kNo, Authenticated::kYes)),
                         [](const auto& info) {
                           return (std::get<0>(info.param) == &unix_pair ? "Unix" : "Tcp") +
                                  name_of(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == Authenticated::kYes ? "Authenticated"
                                                                                  : "");
                         });

TEST_P(FrameStreams, CarryRandomFrames) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  const auto frames = random_frames(200);
  Collector collector;
  for (size_t i = 0; i < frames.size(); ++i) {
    from.queue(header_of(i), frames[i].body, frames[i].payload);
    if (i % 7 == 0) pump(from, to, collector, i + 1, 100'000);
  }
  pump(from, to, collector, frames.size());
  EXPECT_EQ(from.queued_bytes(), 0U);
  expect_same(collector.frames, frames);
}

TEST_P(FrameStreams, CarryFramesInBothDirectionsTogether) {
  auto [left, right] = pair();
  const auto frames = random_frames(100);
  const auto converse = [&frames](Descriptor socket, void (*authenticate)(FrameStream&)) {
    FrameStream stream(std::move(socket), payloads());
    authenticate(stream);
    Collector collector;
    for (size_t i = 0; i < frames.size(); ++i) {
      stream.queue(header_of(i), frames[i].body, frames[i].payload);
    }
    while (stream.queued_bytes() > 0 || collector.frames.size() < frames.size()) {
      const bool blocked = stream.flush() == Flow::kBlocked;
      const Flow flow = stream.receive(collector, 1 << 20);
      if (flow == Flow::kClosed) break;
      if (flow == Flow::kIdle && collector.frames.size() < frames.size()) {
        wait_for(stream.fd(), blocked ? POLLIN | POLLOUT : POLLIN, in_a_minute());
      }
    }
    expect_same(collector.frames, frames);
  };
  std::thread other(converse, std::move(right), authenticate_right);
  converse(std::move(left), authenticate_left);
  other.join();
}

TEST_P(FrameStreams, AreWholeAtAnySplit) {
  const Bytes body = random_bytes(40, test_seed());
  const Bytes payload = random_bytes(300, test_seed());
  Bytes wire;
  {
    auto [left, right] = pair();
    FrameStream from(std::move(left), payloads());
    authenticate_left(from);
    for (uint64_t id = 0; id < 2; ++id) from.queue(header_of(id), body, payload);
    ASSERT_EQ(from.flush(), Flow::kIdle);
    const size_t overhead =
        authenticated() ? sizeof(RecordHeader) + sizeof(Tag) : 0;  // of a record
    wire.resize(2 * (sizeof(Header) + 340) + overhead);
    ASSERT_EQ(recv(right.get(), wire.data(), wire.size(), MSG_WAITALL),
              static_cast<ssize_t>(wire.size()));
  }
  auto [left, right] = pair();
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  Collector collector;
  const auto pass = [&, sender = left.get()](const std::byte* from, size_t bytes) {
    ASSERT_EQ(send(sender, from, bytes, 0), static_cast<ssize_t>(bytes));
    ASSERT_TRUE(wait_for(to.fd(), POLLIN, in_a_minute()));
    for (size_t seen = 0; seen < 2; ++seen) ASSERT_EQ(to.receive(collector, 1 << 20), Flow::kIdle);
  };
  for (size_t cut = 1; cut < wire.size(); ++cut) {
    collector.frames.clear();
    authenticate_right(to);  // so record numbers start again at 0
    pass(wire.data(), cut);
    pass(wire.data() + cut, wire.size() - cut);
    while (collector.frames.size() < 2) {
      ASSERT_TRUE(wait_for(to.fd(), POLLIN, in_a_minute()));
      to.receive(collector, 1 << 20);
    }
    for (const Got& got : collector.frames) {
      ASSERT_TRUE(got.body == body && got.payload == payload) << "cut at " << cut;
    }
  }
}

TEST_P(FrameStreams, BlockAndContinue) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  const auto payload = std::make_shared<const Bytes>(random_bytes(kMaxPayload, test_seed()));
  size_t count = 0;
  do {
    from.queue(header_of(count++), {}, *payload, payload);
  } while (from.flush() == Flow::kIdle && count < 1000);
  ASSERT_LT(count, 1000U);
  const uint64_t queued = from.queued_bytes();
  EXPECT_GT(queued, 0U);
  EXPECT_GT(payload.use_count(), 1);
  from.flush();
  EXPECT_LE(from.queued_bytes(), queued);

  Collector collector;
  pump(from, to, collector, count);
  EXPECT_EQ(from.queued_bytes(), 0U);
  EXPECT_EQ(payload.use_count(), 1);  // the stream holds no payload that it has sent
  ASSERT_EQ(collector.frames.size(), count);
  for (const Got& got : collector.frames) EXPECT_TRUE(got.payload == *payload);
}

TEST_P(FrameStreams, TakeManyShortFramesInFewCalls) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  constexpr uint64_t kCount = 500;
  for (uint64_t id = 0; id < kCount; ++id) from.queue(header_of(id), random_bytes(16, id));
  ASSERT_EQ(from.flush(), Flow::kIdle);
  Collector collector;
  int calls = 0;
  while (collector.frames.size() < kCount) {
    wait_for(to.fd(), POLLIN, in_a_minute());
    to.receive(collector, 1 << 20);
    ASSERT_LT(++calls, 50);
  }
}

TEST_P(FrameStreams, PauseWhenAsked) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  for (uint64_t id = 0; id < 3; ++id) from.queue(header_of(id), {});
  ASSERT_EQ(from.flush(), Flow::kIdle);
  Collector collector;
  collector.on_frame = [&to] { to.pause(); };
  ASSERT_TRUE(wait_for(to.fd(), POLLIN, in_a_minute()));
  for (size_t seen = 1; seen <= 3; ++seen) {
    EXPECT_EQ(to.receive(collector, 1 << 20), Flow::kMore);
    EXPECT_EQ(collector.frames.size(), seen);
  }
  EXPECT_EQ(to.receive(collector, 1 << 20), Flow::kIdle);
}

TEST_P(FrameStreams, SkipUnwantedPayloads) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  FrameStream to(std::move(right), payloads());
  authenticate_right(to);
  const Bytes payload(kMaxPayload);
  Collector collector;
  collector.drops = true;
  for (uint64_t id = 0; id < 3; ++id) from.queue(header_of(id), {}, payload);
  pump(from, to, collector, 3);
  EXPECT_EQ(collector.frames.size(), 3U);
}

TEST_P(FrameStreams, ReportTheOtherEndsClose) {
  auto [left, right] = pair();
  FrameStream from(std::move(left), payloads());
  authenticate_left(from);
  from.queue(header_of(0), {});
  ASSERT_EQ(from.flush(), Flow::kIdle);
  Collector collector;
  {
    FrameStream to(std::move(right), payloads());
    authenticate_right(to);
    ASSERT_TRUE(wait_for(to.fd(), POLLIN, in_a_minute()));
    EXPECT_EQ(to.receive(collector, 1 << 20), Flow::kIdle);
  }
  ASSERT_TRUE(wait_for(from.fd(), POLLIN, in_a_minute()));
  EXPECT_EQ(from.receive(collector, 1 << 20), Flow::kClosed);
  Flow flow = Flow::kIdle;
  for (const auto deadline = in_a_minute();
       flow != Flow::kClosed && std::chrono::steady_clock::now() < deadline;) {
    from.queue(header_of(1), {});
    flow = from.flush();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(flow, Flow::kClosed);
}

TEST_P(FrameStreams, RefuseMalformedHeaders) {
  const auto refused = [](const std::string& cause, const std::function<void(Header&)>& spoil) {
    auto [left, right] = pair();
    FrameStream to(std::move(right), payloads());
    Header header = header_of(0);
    spoil(header);
    ASSERT_EQ(send(left.get(), &header, sizeof(header), 0), static_cast<ssize_t>(sizeof(header)));
    Collector collector;
    expect_error(ErrorKind::kNetwork, {"a frame is malformed", cause}, [&] {
      wait_for(to.fd(), POLLIN, in_a_minute());
      to.receive(collector, 1 << 20);
    });
    EXPECT_TRUE(collector.frames.empty());
  };
  refused("SMB1", [](Header& header) { header.magic ^= 1; });
  refused("version", [](Header& header) { header.version = kVersion + 1; });
  refused("opcode", [](Header& header) { header.opcode = Opcode{0}; });
  refused("opcode", [](Header& header) { header.opcode = Opcode{200}; });
  refused("body", [](Header& header) { header.body_bytes = kMaxBody + 1; });
  refused("payload", [](Header& header) { header.payload_bytes = kMaxPayload + 1; });
  refused("payload", [](Header& header) { header.payload_bytes = UINT32_MAX; });
}

bool same_file(int left, int right) {
  struct stat one{};
  struct stat other{};
  return fstat(left, &one) == 0 && fstat(right, &other) == 0 && one.st_ino == other.st_ino &&
         one.st_dev == other.st_dev;
}

class Descriptors : public testing::TestWithParam<Payloads> {};

INSTANTIATE_TEST_SUITE_P(Payloads, Descriptors,
                         testing::Values(Payloads::kPrivate, Payloads::kShared),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Descriptors, ComeWithTheirFrames) {
  auto [left, right] = unix_pair();
  FrameStream from(std::move(left), GetParam());
  FrameStream to(std::move(right), GetParam());
  std::mt19937_64 random = test_random();
  constexpr uint64_t kCount = 300;
  std::vector<Descriptor> originals;
  Collector collector;
  for (uint64_t id = 0; id < kCount; ++id) {
    Descriptor passed;
    originals.emplace_back(-1);
    if (random() % 3 == 0) {
      originals.back() = Descriptor(memfd_create("test", MFD_CLOEXEC));
      passed = Descriptor(dup(originals.back().get()));
    }
    const size_t payload_bytes = random() % 4 == 0 ? random() % 100'000 : 0;
    const auto payload = std::make_shared<Bytes>(random_bytes(payload_bytes, id));
    from.queue(header_of(id), random_bytes(random() % 100, id), *payload, payload,
               std::move(passed));
    if (random() % 10 == 0) pump(from, to, collector, id + 1, random() % 2 == 0 ? 1 : 1 << 20);
  }
  pump(from, to, collector, kCount);
  ASSERT_EQ(collector.frames.size(), kCount);
  for (uint64_t id = 0; id < kCount; ++id) {
    const int got = collector.frames[id].descriptor.get();
    ASSERT_EQ(got >= 0, originals[id].get() >= 0) << id;
    if (got >= 0) {
      EXPECT_TRUE(same_file(got, originals[id].get())) << id;
      EXPECT_NE(fcntl(got, F_GETFD) & FD_CLOEXEC, 0);
    }
  }
}

// Sends `bytes` with several copies of a descriptor, which a FrameStream never does.
void send_with(int socket, const void* data, size_t bytes, int descriptor, size_t copies) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(copies * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(copies * sizeof(int));
  for (size_t i = 0; i < copies; ++i) {
    std::memcpy(CMSG_DATA(header) + i * sizeof(int), &descriptor, sizeof(int));
  }
  ASSERT_EQ(sendmsg(socket, &message, 0), static_cast<ssize_t>(bytes));
}

size_t open_descriptors() {
  size_t count = 0;
  for (int i = 0; i < 1024; ++i) count += fcntl(i, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

TEST_P(Descriptors, AreRefusedTogether) {
  const size_t before = open_descriptors();
  {
    auto [left, right] = unix_pair();
    FrameStream to(std::move(right), GetParam());
    Collector collector;
    const Header header = header_of(0);
    send_with(left.get(), &header, sizeof(header), left.get(), 2);
    expect_error(ErrorKind::kNetwork, {"several"}, [&] { to.receive(collector, 1 << 20); });
  }
  {
    auto [left, right] = unix_pair();
    FrameStream to(std::move(right), GetParam());
    Collector collector;
    Header header = header_of(0);
    header.payload_bytes = 1000;
    ASSERT_EQ(send(left.get(), &header, sizeof(header), 0), static_cast<ssize_t>(sizeof(header)));
    expect_error(ErrorKind::kNetwork, {"several descriptors"}, [&] {
      for (int i = 0; i < 10; ++i) {
        send_with(left.get(), "x", 1, left.get(), 1);
        while (to.receive(collector, 1 << 20) == Flow::kIdle && wait_for(to.fd(), POLLIN, {})) {
        }
      }
    });
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Sockets, ErrorsNameTheCause) {
  const auto deadline = [] { return std::chrono::steady_clock::now() + std::chrono::seconds(2); };
  uint16_t port = 0;
  {
    const Descriptor listener = listen_at({"127.0.0.1", 0, ""});
    port = local_port(listener.get());
    EXPECT_GT(port, 0);
    expect_error(ErrorKind::kUnavailable, {"127.0.0.1:" + std::to_string(port), "in use"},
                 [port] { listen_at({"127.0.0.1", port, ""}); });
  }
  expect_error(ErrorKind::kNetwork, {"smb://127.0.0.1:" + std::to_string(port), "refused"},
               [&] { connect_to({"127.0.0.1", port, ""}, deadline()); });
  expect_error(ErrorKind::kNetwork, {"smb+unix:///nowhere/at/all", "No such file"},
               [&] { connect_to({"", 0, "/nowhere/at/all"}, deadline()); });
  expect_error(ErrorKind::kNetwork, {"no-such-host.invalid:7"},
               [&] { connect_to({"no-such-host.invalid", 7, ""}, deadline()); });
}

TEST(Sockets, ReplaceAnOrphanedSocketFile) {
  const Scratch directory("/tmp");
  const std::string path = directory / "socket";
  {
    const Descriptor stale = listen_at({"", 0, path});
  }
  {
    const Descriptor listener = listen_at({"", 0, path});
    struct stat file{};
    ASSERT_EQ(stat(path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & 0777, 0600U);
    expect_error(ErrorKind::kUnavailable, {path, "another process listens"},
                 [&path] { listen_at({"", 0, path}); });
  }
}

TEST(Sockets, ListenOnEveryInterface) {
  const Descriptor listener = listen_at({"", 0, ""});
  const uint16_t port = local_port(listener.get());
  const Deadline deadline = in_a_minute();
  EXPECT_GE(connect_to({"127.0.0.1", port, ""}, deadline).get(), 0);
  EXPECT_GE(connect_to({"localhost", port, ""}, deadline).get(), 0);
}

}  // namespace
}  // namespace hbm::box::protocol
