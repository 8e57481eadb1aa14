// SIGKILL ends a box or a client over RDMA. The tests check the errors of the other processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "guest/verbs_box.h"
#include "smb_client.h"

namespace hbm::box::verbs {
namespace {

using namespace std::chrono_literals;
using box::client::AllocOptions;
using box::client::BoxError;
using box::client::Client;
using box::client::Segment;

constexpr uint64_t kSize = uint64_t{1} << 20;
constexpr int kHeld = 4;  // segments of a client that is killed

std::unique_ptr<Client> connect(const std::string& url) {
  box::client::ClientOptions options;
  options.url = url;
  options.token = kToken;
  options.transport = box::client::TransportChoice::kVerbs;
  options.reconnect_timeout = 120s;
  return std::make_unique<Client>(options);
}

AllocOptions of_size(uint64_t bytes) {
  AllocOptions options;
  options.size = bytes;
  return options;
}

// A directory in memory: a device cannot write into files on a disk.
class Scratch {
 public:
  Scratch() {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp");
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  std::string store() const { return path_ + "/store"; }

 private:
  std::string path_ = "/dev/shm/box_XXXXXX";
};

constexpr const char* kHolderWord = "--holder";

// A client that writes for ever to segments that only it knows.
void hold(const char* const* words) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto client = connect(words[0]);
  AllocOptions options = of_size(kSize);
  options.temporary = true;
  std::vector<Segment> segments;
  for (int i = 0; i < kHeld; ++i) segments.push_back(client->alloc(options));
  if (write(std::stoi(words[1]), "", 1) != 1) _exit(1);
  const std::vector<std::byte> bytes(kSize);
  for (;;) client->write(segments[0], 0, bytes.data(), kSize);
}

TEST(VerbsDeaths, ABoxIsKilledWhileClientsReadAndWrite) {
  const Scratch scratch;
  auto box = std::make_unique<BoxProcess>(BoxOptions{0, scratch.store(), 30s});
  const auto client = connect(box->url());
  const Segment data = client->alloc(of_size(kSize));
  const Segment cell = client->alloc(of_size(8));

  std::atomic<bool> stop{false};
  std::atomic<int64_t> added{0}, rounds{0};
  std::thread mover([&] {
    std::vector<std::byte> out(kSize), back(kSize);
    for (uint8_t round = 1; !stop; ++round, ++rounds) {
      std::ranges::fill(out, std::byte{round});
      client->write(data, 0, out.data(), kSize);
      client->read(data, 0, back.data(), kSize);
      ASSERT_EQ(out, back);
    }
  });
  std::thread adder([&] {
    for (; !stop; ++added) ASSERT_EQ(client->fetch_add(cell, 0, 1), added);
  });
  const auto grows = [&](int64_t most) {
    const int64_t start = rounds, first = added;
    const auto until = std::chrono::steady_clock::now() + 120s;
    while ((rounds < start + most || added < first + most) &&
           std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(1ms);
    }
    return rounds >= start + most && added >= first + most;
  };
  EXPECT_TRUE(grows(3));
  for (int i = 0; i < 2; ++i) {
    const uint16_t port = box->port();
    box->kill();
    box = std::make_unique<BoxProcess>(BoxOptions{port, scratch.store(), 30s});
    EXPECT_TRUE(grows(3)) << "after death " << i;
  }
  stop = true;
  mover.join();
  adder.join();
  EXPECT_EQ(client->fetch_add(cell, 0, 0), added);
}

TEST(VerbsDeaths, WithoutAStoreTheSegmentsAreLost) {
  auto box = std::make_unique<BoxProcess>();
  const auto client = connect(box->url());
  const Segment segment = client->alloc(of_size(kSize));
  const uint16_t port = box->port();
  box->kill();
  box = std::make_unique<BoxProcess>(BoxOptions{port, {}, 30s});
  std::array<std::byte, 8> bytes{};
  try {
    client->read(segment, 0, bytes.data(), bytes.size());
    FAIL() << "the segment is there";
  } catch (const BoxError& error) {
    EXPECT_EQ(error.cause(), BoxError::Cause::kLost) << error.what();
  }
}

TEST(VerbsDeaths, AClientIsKilledWhileItHoldsSegments) {
  const BoxProcess box(BoxOptions{0, {}, 10s});
  std::array<int, 2> ready{};
  ASSERT_EQ(pipe(ready.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "holder", kHolderWord, box.url().c_str(),
          std::to_string(ready[1]).c_str(), nullptr);
    _exit(127);
  }
  char byte = 1;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const auto client = connect(box.url());
  EXPECT_EQ(client->stats().totals.segments, kHeld);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);

  const auto until = std::chrono::steady_clock::now() + 120s;
  protocol::StatsTotals totals{};
  do {
    std::this_thread::sleep_for(20ms);
    totals = client->stats().totals;
  } while ((totals.clients > 1 || totals.used_bytes > 0) &&
           std::chrono::steady_clock::now() < until);
  EXPECT_EQ(totals.clients, 1u);
  EXPECT_EQ(totals.segments, 0u);
  EXPECT_EQ(totals.used_bytes, 0u);
}

TEST(VerbsDeaths, AForkedChildLearnsWhyItCannotConnect) {
  const BoxProcess box;
  const auto client = connect(box.url());
  const pid_t child = fork();
  if (child == 0) {
    try {
      connect(box.url());
    } catch (const Error& error) {
      _exit(std::strstr(error.what(), "forked") != nullptr ? 0 : 1);
    }
    _exit(2);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_NO_THROW(client->ping());  // the parent's connection is as it was
}

// Some replies need more than one message.
TEST(VerbsDeaths, LongRepliesComeWhole) {
  const BoxProcess box;
  const auto client = connect(box.url());
  std::vector<Segment> segments;
  for (int i = 0; i < 150; ++i) segments.push_back(client->alloc(of_size(1)));
  EXPECT_EQ(client->stats().segments.size(), segments.size());
}

}  // namespace
}  // namespace hbm::box::verbs

int main(int argc, char** argv) {
  if (hbm::box::verbs::was_box(argc, argv)) return 0;
  if (argc > 1 && std::strcmp(argv[1], hbm::box::verbs::kHolderWord) == 0) {
    hbm::box::verbs::hold(argv + 2);
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
