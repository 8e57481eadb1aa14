// SIGKILL ends a box with a store at random times, while clients add to a common segment, and
// convert numbers of their own between two types. Afterwards every addition is applied exactly
// once, and no client has seen an error.
//
// The box is a separate process: this program, started again with HBM_KILL_TEST_STORE set.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "box/server.h"
#include "scratch.h"
#include "seeds.h"
#include "smb_client.h"
#include "stress.h"

extern char** environ;

namespace hbm::box::client {
namespace {

constexpr uint64_t kNumbers = 200'000;  // int64: several chunks, shared by several threads
constexpr protocol::Id kTotal{.high = 0, .low = 1};

[[noreturn]] void serve(const char* store, const char* socket, const char* listen) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ServerOptions options;
  options.listen = {listen};
  options.socket_path = socket;
  options.memory = uint64_t{64} << 20;
  options.store = store;
  Server server(options);
  const std::string line = server.url() + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(1);
  for (;;) pause();
}

// A port of 127.0.0.1 that stays reserved while the box is down. A socket is bound to the port but
// does not listen. So the kernel gives the port to no other socket, and the box can bind it
// (SO_REUSEADDR).
class Port {
 public:
  Port() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int yes = 1;
    EXPECT_EQ(setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address_;
    auto* const address = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(bind(socket_.get(), address, size), 0) << std::strerror(errno);
    EXPECT_EQ(getsockname(socket_.get(), address, &size), 0);
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(ntohs(address_.sin_port)); }

 private:
  const Descriptor socket_;
  sockaddr_in address_{};
};

class BoxProcess {
 public:
  explicit BoxProcess(const std::string& store) : store_(store), socket_(directory_ / "socket") {
    start();
  }
  ~BoxProcess() { end(); }

  const std::string& url() const { return url_; }

  void restart() {
    end();
    start();
  }

 private:
  void start() {
    setenv("HBM_KILL_TEST_STORE", store_.c_str(), 1);
    setenv("HBM_KILL_TEST_SOCKET", socket_.c_str(), 1);
    setenv("HBM_KILL_TEST_LISTEN", port_.address().c_str(), 1);
    int out[2];
    ASSERT_EQ(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    char self[] = "/proc/self/exe";
    char* arguments[] = {self, nullptr};
    ASSERT_EQ(posix_spawn(&pid_, self, &actions, nullptr, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    url_.clear();
    for (char c = 0; read(out[0], &c, 1) == 1 && c != '\n';) url_ += c;
    close(out[0]);
    ASSERT_NE(url_, "") << "the box did not start";
  }

  void end() const {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  const std::string store_;
  const Scratch directory_{"/tmp"};  // a socket's path must be short
  const std::string socket_;
  const Port port_;
  std::string url_;
  pid_t pid_ = 0;
};

template <class T>
std::byte* bytes_of(std::vector<T>& numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}

ClientOptions options_for(const std::string& url, const std::string& transport) {
  ClientOptions options;
  options.url = url;
  options.transport = parse_transport(transport);
  return options;
}

// The number of kills between two waits for progress of every client. A client retries at longer
// and longer intervals, at last once a second. Without the waits, a client could find the box dead
// at each try, and would rightly give up.
constexpr int kKillsInARow = 10;

// HBM_STRESS_KILLS=1000 kills the box a thousand times.
TEST(SmbKill, EverySumIsAppliedOnce) {
  const int most = stress("HBM_STRESS_KILLS", 10);
  const Scratch directory;
  BoxProcess box(directory.store());
  const std::string url = box.url();

  constexpr const char* kTransports[] = {"shm", "tcp", "tcp"};
  std::barrier ready(std::size(kTransports) + 1);
  std::atomic<bool> stop{false};
  std::array<std::atomic<int>, std::size(kTransports)> rounds{};  // completed rounds of each client
  std::vector<std::thread> clients;
  for (size_t self = 0; self < std::size(kTransports); ++self) {
    clients.emplace_back([&, self] {
      Client client(options_for(url, kTransports[self]));
      const Segment total = client.alloc({.size = 8 * (kNumbers + 1), .key = kTotal});
      const Segment ones = client.alloc({.size = 8 * kNumbers});
      const Segment halves = client.alloc({.size = 4 * kNumbers});
      const Segment copy = client.alloc({.size = 8 * kNumbers});
      std::vector<int64_t> values(kNumbers, 1);
      client.write(ones, 0, bytes_of(values), 8 * kNumbers);
      std::vector<float> floats(kNumbers, 0.5f);
      client.write(halves, 0, bytes_of(floats), 4 * kNumbers);
      ready.arrive_and_wait();
      while (!stop) {
        client.accumulate(total, ones, {.dtype = Dtype::kInt64, .bytes = 8 * kNumbers});
        client.fetch_add(total, 8 * kNumbers, 1);
        // Changes the sign of every element of `halves`, by a conversion to float64 and back. So a
        // repeated or lost request shows as a wrong sign.
        client.accumulate(copy, halves,
                          {.dtype = Dtype::kFloat64,
                           .source_dtype = Dtype::kFloat32,
                           .combine = Combine::kAssign,
                           .scale = 2,
                           .bytes = 8 * kNumbers});
        client.accumulate(halves, copy,
                          {.dtype = Dtype::kFloat32,
                           .source_dtype = Dtype::kFloat64,
                           .scale = -1,
                           .bytes = 4 * kNumbers});
        ++rounds[self];
      }
      client.read(halves, 0, bytes_of(floats), 4 * kNumbers);
      const float expected = rounds[self] % 2 == 0 ? 0.5f : -0.5f;
      EXPECT_EQ(std::ranges::count(floats, expected), static_cast<ptrdiff_t>(kNumbers))
          << rounds[self];
    });
  }
  ready.arrive_and_wait();
  std::mt19937_64 random = test_random();
  for (int kills = 0; kills < most && !HasFatalFailure(); ++kills) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    box.restart();
    if (kills % kKillsInARow != kKillsInARow - 1) continue;
    for (std::atomic<int>& done : rounds) {
      const int before = done;
      while (done == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  stop = true;
  for (auto& client : clients) client.join();

  Client reader(options_for(url, "auto"));
  const Segment total = reader.alloc(
      {.size = 8 * (kNumbers + 1), .key = kTotal, .mode = protocol::AllocMode::kAttach});
  const int64_t sums = std::accumulate(rounds.begin(), rounds.end(), int64_t{0});
  std::vector<int64_t> found(kNumbers + 1);
  reader.read(total, 0, bytes_of(found), 8 * found.size());
  EXPECT_GT(sums, 0);
  EXPECT_EQ(std::ranges::count(found, sums), static_cast<ptrdiff_t>(found.size()));
  RecordProperty("sums", std::to_string(sums));
}

}  // namespace
}  // namespace hbm::box::client

int main(int argc, char** argv) {
  if (const char* store = std::getenv("HBM_KILL_TEST_STORE")) {
    hbm::box::client::serve(store, std::getenv("HBM_KILL_TEST_SOCKET"),
                            std::getenv("HBM_KILL_TEST_LISTEN"));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
