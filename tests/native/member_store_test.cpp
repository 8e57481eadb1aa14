// The store that a member of a group serves to the others.
#include "bootstrap/member_store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/tcp.h"
#include "bootstrap/member_key_value.h"
#include "expect_error.h"
#include "forked_ranks.h"
#include "seeds.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;
using Values = std::vector<std::optional<std::string>>;

const std::string kHere = "127.0.0.1";
const std::string kPassword = "a password of the store";

MemberStore::Deadline in(milliseconds time) { return std::chrono::steady_clock::now() + time; }
MemberStore::Deadline late() { return in(milliseconds(60'000)); }

std::shared_ptr<MemberStore> open_here(uint16_t port) {
  return open_member_store({kHere}, port, kPassword, late());
}

// A store, and the access of its process or of another one.
class MemberStoreFunctions : public testing::TestWithParam<bool> {
 protected:
  uint16_t port_ = 0;
  const std::shared_ptr<MemberStore> served_ = serve_member_store(kPassword, port_);
  const std::shared_ptr<MemberStore> store_ = GetParam() ? open_here(port_) : served_;
};

TEST_P(MemberStoreFunctions, KeysHaveValues) {
  EXPECT_EQ(store_->get({"a", "b"}, late()), Values(2));
  store_->set("a", "1", late());
  store_->set("b", std::string("\0two", 4), late());
  store_->set("empty", "", late());
  EXPECT_EQ(store_->get({"b", "c", "empty", "a"}, late()),
            (Values{std::string("\0two", 4), std::nullopt, "", "1"}));
  EXPECT_TRUE(store_->has({"a", "b"}, late()));
  EXPECT_FALSE(store_->has({"a", "c"}, late()));
  EXPECT_EQ(store_->count(late()), 3);
  EXPECT_EQ(store_->remove({"a", "c", "b"}, late()), 2);
  EXPECT_EQ(store_->remove({"a"}, late()), 0);
  EXPECT_EQ(served_->count(late()), 1);
}

TEST_P(MemberStoreFunctions, NumbersAreAdded) {
  EXPECT_EQ(store_->add("n", 5, late()), 5);
  EXPECT_EQ(store_->add("n", -7, late()), -2);
  store_->set("most", "9223372036854775807", late());
  expect_error(ErrorKind::kInvalid, {"the sum is too large"},
               [&] { store_->add("most", 1, late()); });
  EXPECT_EQ(store_->get({"n"}, late()), Values{"-2"});
  store_->set("text", "many", late());
  expect_error(ErrorKind::kInvalid, {"cannot add to \"many\""},
               [&] { store_->add("text", 1, late()); });
  EXPECT_EQ(store_->get({"text"}, late()), Values{"many"});
}

TEST_P(MemberStoreFunctions, ReplacesOnlyTheExpectedValue) {
  EXPECT_EQ(store_->replace("key", "old", "new", late()), "old");  // absent: stays absent
  EXPECT_FALSE(store_->has({"key"}, late()));
  EXPECT_EQ(store_->replace("key", "", "first", late()), "first");
  EXPECT_EQ(store_->replace("key", "", "second", late()), "first");
  EXPECT_EQ(store_->replace("key", "first", "third", late()), "third");
  EXPECT_EQ(store_->get({"key"}, late()), Values{"third"});
}

TEST_P(MemberStoreFunctions, ValuesGrow) {
  store_->append("list", "a", late());
  store_->append("list", "bc", late());
  EXPECT_EQ(served_->get({"list"}, late()), Values{"abc"});
}

TEST_P(MemberStoreFunctions, AWaitEndsWithTheLastKey) {
  constexpr std::chrono::microseconds kLong = std::chrono::seconds(60);
  const auto other = open_here(port_);
  std::thread waiter([&] {
    EXPECT_TRUE(store_->await({{"a", "b", "c"}}, kLong, late()));
    EXPECT_TRUE(store_->has({"a", "b", "c"}, late()));
  });
  served_->set("c", "", late());
  other->set("a", "", late());
  EXPECT_EQ(other->add("b", 1, late()), 1);
  waiter.join();
  EXPECT_FALSE(store_->await({{"a", "d"}}, milliseconds(1), late()));
}

TEST_P(MemberStoreFunctions, AWaitEndsWithTheNumber) {
  constexpr std::chrono::microseconds kLong = std::chrono::seconds(60);
  const auto other = open_here(port_);
  other->add("n", 2, late());
  EXPECT_FALSE(store_->await({{"n"}, 5}, milliseconds(1), late()));
  std::thread waiter([&] { EXPECT_TRUE(store_->await({{"n"}, 5}, kLong, late())); });
  other->add("n", 2, late());
  served_->add("n", 1, late());
  waiter.join();
  other->set("n", "many", late());  // will never be a number
  EXPECT_TRUE(store_->await({{"n"}, 5}, kLong, late()));
}

TEST_P(MemberStoreFunctions, TooMuchIsRefused) {
  const std::string half(40 << 20, 'x');
  store_->set("half", half, late());
  expect_error(ErrorKind::kInvalid, {"more than 64 MiB"},
               [&] { store_->get({"half", "half"}, late()); });
  expect_error(ErrorKind::kInvalid, {"more than 64 MiB"},
               [&] { store_->set("two", half + half, late()); });
  EXPECT_EQ(store_->count(late()), 1);
}

TEST_P(MemberStoreFunctions, LargeValuesArrive) {
  std::mt19937_64 random = test_random();
  std::string value(20'000'003, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  store_->set("large", value, late());
  EXPECT_TRUE(served_->get({"large"}, late()) == Values{value});
  EXPECT_TRUE(store_->get({"large", "none", "large"}, late()) ==
              (Values{value, std::nullopt, value}));
}

INSTANTIATE_TEST_SUITE_P(Access, MemberStoreFunctions, testing::Bool(), [](const auto& info) {
  return info.param ? "OfAnotherProcess" : "OfItsProcess";
});

TEST(MemberStore, QuestionsOfManyClientsAreAnsweredOneByOne) {
  constexpr int kClients = 8;
  constexpr int kQuestions = 500;
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  const auto shared = open_here(port);
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      const auto own = client % 2 == 0 ? shared : open_here(port);
      const std::string key = "of " + std::to_string(client);
      for (int i = 1; i <= kQuestions; ++i) {
        own->add("sum", 1, late());
        own->set(key, std::to_string(i), late());
        ASSERT_EQ(own->get({key}, late()), Values{std::to_string(i)});
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(served->add("sum", 0, late()), kClients * kQuestions);
}

// Each client waits for the number that the client before it has written.
TEST(MemberStore, ManyClientsWait) {
  constexpr int kClients = 8;
  constexpr int kRounds = 100;
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      const auto own = client == 0 ? served : open_here(port);
      for (int turn = client; turn < kClients * kRounds; turn += kClients) {
        const std::vector<std::string> before{"turn " + std::to_string(turn - 1)};
        while (turn > 0 && !own->await({before}, std::chrono::seconds(1), late())) {
        }
        EXPECT_TRUE(turn == 0 || own->has(before, late()));
        own->set("turn " + std::to_string(turn), "", late());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(served->count(late()), kClients * kRounds);
}

TEST(MemberStore, AClientEndsDuringItsWait) {
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  std::optional<std::shared_ptr<MemberStore>> store = open_here(port);
  expect_error(ErrorKind::kTimeout, {"did not answer"},
               [&] { (*store)->await({{"key"}}, std::chrono::seconds(60), in(milliseconds(20))); });
  store.reset();
  served->set("key", "value", late());
  EXPECT_EQ(open_here(port)->count(late()), 1);
}

TEST(MemberStore, StrangersAreTurnedAway) {
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  expect_error(ErrorKind::kNetwork, {"another program answers there"},
               [&] { open_member_store({kHere}, port, "another password", late()); });
  std::mt19937_64 random = test_random();
  std::vector<Descriptor> strangers;
  for (int turn = 0; turn < 30; ++turn) {
    Descriptor stranger = start_to_connect(kHere, port);
    pollfd connected{stranger.get(), POLLOUT, 0};
    ASSERT_EQ(poll(&connected, 1, -1), 1);
    std::string bytes(random() % 100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (turn % 2 == 0) strangers.push_back(std::move(stranger));  // stays connected
  }
  const auto store = open_here(port);
  store->set("key", "value", late());
  EXPECT_EQ(served->count(late()), 1);
}

TEST(MemberStore, TheAddressThatLeadsThereIsFound) {
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  uint16_t silent_port = 0;
  // 192.0.2.0/24 is reserved for documents: no machine has such an address.
  const auto store = open_member_store({"192.0.2.77", kHere}, port, kPassword, late());
  store->set("key", "value", late());
  EXPECT_EQ(served->count(late()), 1);
  const Descriptor silent = listen_on_all_addresses(silent_port);
  expect_error(ErrorKind::kTimeout, {kHere + ":" + std::to_string(silent_port) + ": no answer"},
               [&] { open_member_store({kHere}, silent_port, kPassword, in(milliseconds(500))); });
}

TEST(MemberStore, NobodyAtTheAddress) {
  uint16_t port = 0;
  listen_on_all_addresses(port);  // and closes the listener
  expect_error(ErrorKind::kNetwork, {std::to_string(port) + ": Connection refused"},
               [&] { open_here(port); });
}

TEST(MemberStore, CheckEndsAnAttempt) {
  uint16_t port = 0;
  const Descriptor silent = listen_on_all_addresses(port);
  int checks = 0;
  expect_error(ErrorKind::kDeath, {"it has died"}, [&] {
    open_member_store({kHere}, port, kPassword, late(), [&] {
      if (++checks == 3) throw Error(ErrorKind::kDeath, "it has died");
    });
  });
}

// A process that serves a store until it is killed.
class ServingProcess {
 public:
  ServingProcess() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    from_ = ends[0];
    pid_ = fork();
    if (pid_ == 0) serve(ends[1]);
    close(ends[1]);
    EXPECT_EQ(read(from_, &port_, sizeof port_), static_cast<ssize_t>(sizeof port_));
  }
  ~ServingProcess() {
    kill();
    close(from_);
  }

  uint16_t port() const { return port_; }
  // Makes the process fork a child. REQUIRES: it serves all its clients already.
  void fork_child() const {
    ::kill(pid_, SIGUSR1);
    char ready = 0;
    EXPECT_EQ(read(from_, &ready, 1), 1);
  }
  void resume() const { ::kill(pid_, SIGCONT); }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    while (waitpid(pid_, &status, WUNTRACED) == pid_ && !WIFSTOPPED(status)) {
    }
  }
  void kill() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  [[noreturn]] static void serve(int to) {
    sigset_t request;
    sigemptyset(&request);
    sigaddset(&request, SIGUSR1);
    sigprocmask(SIG_BLOCK, &request, nullptr);
    uint16_t port = 0;
    const auto served = serve_member_store(kPassword, port);
    if (write(to, &port, sizeof port) != sizeof port) _exit(1);
    int signal = 0;
    sigwait(&request, &signal);
    const pid_t parent = getpid();
    if (fork() == 0) {  // lives on for a while after the parent's death
      close(to);
      while (getppid() == parent) usleep(1000);
      usleep(100'000);
      _exit(0);
    }
    if (write(to, "", 1) != 1) _exit(1);
    while (true) pause();
  }

  int from_ = -1;
  pid_t pid_ = 0;
  uint16_t port_ = 0;
};

TEST(MemberStore, ADeathIsNoticed) {
  ServingProcess process;
  const auto store = open_here(process.port());
  store->set("key", "value", late());
  process.fork_child();
  process.kill();
  expect_error(ErrorKind::kNetwork, {"the connection was lost"},
               [&] { store->set("key", "value", late()); });
  expect_error(ErrorKind::kNetwork, {"the connection was lost"},
               [&] { store->has({"key"}, late()); });
}

TEST(MemberStore, ASilentServerIsNoticed) {
  ServingProcess process;
  const auto store = open_here(process.port());
  process.stop();
  expect_error(ErrorKind::kTimeout, {"did not answer before the timeout"},
               [&] { store->has({"key"}, in(milliseconds(50))); });
  process.resume();
  // The late answer is not taken for the answer to the next question.
  EXPECT_EQ(store->add("number", 5, late()), 5);
}

// Returns the StoreError of `ask`.
StoreError error_of(const std::function<void()>& ask) {
  try {
    ask();
  } catch (const StoreError& error) {
    return error;
  }
  ADD_FAILURE() << "no StoreError";
  return StoreError(ErrorKind::kInvalid, "none");
}

TEST_P(MemberStoreFunctions, AreThoseOfAKeyValueStore) {
  MemberKeyValue keys(store_, "the store of rank 0");
  EXPECT_EQ(keys.get("a", late()), std::nullopt);
  EXPECT_EQ(keys.claim("a", "first", late()), "first");
  EXPECT_EQ(keys.claim("a", "second", late()), "first");
  keys.set("b", "", late());
  EXPECT_EQ(keys.get("b", late()), "");
  EXPECT_TRUE(keys.has({"a", "b"}, late()));
  EXPECT_FALSE(keys.has({"a", "c"}, late()));
  EXPECT_EQ(keys.get_all({"b", "a"}, late()), (std::vector<std::string>{"", "first"}));
  EXPECT_EQ(keys.add("n", 3, late()), 3);
  EXPECT_EQ(keys.add("n", 4, late()), 7);
  keys.remove({"a", "c", "b"});
  keys.remove({});
  EXPECT_EQ(served_->count(late()), 1);
}

TEST(MemberKeyValue, ADeathIsNoticed) {
  ServingProcess process;
  MemberKeyValue keys(open_here(process.port()), "the store of rank 0");
  process.kill();
  const StoreError error = error_of([&] { keys.get("key", late()); });
  EXPECT_EQ(error.kind(), ErrorKind::kNetwork);
  EXPECT_EQ(std::string(error.what()),
            "the store of rank 0 is gone: that process has ended (get: the connection was lost)");
  keys.remove({"key"});
}

// Only a question that was never sent may be repeated.
TEST(MemberKeyValue, ALateAnswerIsToldFromAQuestionThatWasNotAsked) {
  ServingProcess process;
  const auto store = open_here(process.port());
  MemberKeyValue keys(store, "the store of rank 0");
  process.stop();
  const StoreError late_answer = error_of([&] { keys.add("n", 1, in(milliseconds(50))); });
  EXPECT_EQ(late_answer.kind(), ErrorKind::kTimeout);
  EXPECT_FALSE(late_answer.never_asked);
  EXPECT_NE(std::string(late_answer.what()).find("did not answer before the timeout"),
            std::string::npos);
  std::thread other([&] { EXPECT_EQ(store->add("n", 2, late()), 3); });
  StoreError error = late_answer;
  while (!error.never_asked) {  // until the other thread asks
    error = error_of([&] { keys.get("n", in(milliseconds(50))); });
  }
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  process.resume();
  other.join();
  EXPECT_EQ(keys.add("n", 4, late()), 7);
}

TEST(MemberStore, AChildCannotUseIt) {
  uint16_t port = 0;
  const auto served = serve_member_store(kPassword, port);
  auto store = open_here(port);
  EXPECT_EQ(run_forked([&] {
              for (MemberStore* each : {served.get(), store.get()}) {
                expect_error(ErrorKind::kUnavailable, {"its parent's"},
                             [&] { each->count(late()); });
              }
              store.reset();
            }),
            0);
  store->set("key", "value", late());
  EXPECT_EQ(served->count(late()), 1);
}

TEST(MemberStore, ServesOnWithoutDescriptors) {
  EXPECT_EQ(run_forked([] {
              uint16_t port = 0;
              const auto served = serve_member_store(kPassword, port);
              const auto first = open_here(port);
              rlimit before{};
              ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
              const rlimit lowered{100, before.rlim_max};
              ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &lowered), 0);
              std::vector<Descriptor> used;
              while (used.empty() || used.back()) used.emplace_back(dup(0));
              used.resize(used.size() - 2);  // frees a descriptor for the client's end alone
              expect_error(ErrorKind::kTimeout, {"no answer"}, [&] {
                open_member_store({kHere}, port, kPassword, in(milliseconds(500)));
              });
              first->set("key", "value", late());
              ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
              open_here(port)->set("other", "value", late());
              EXPECT_EQ(served->count(late()), 2);
            }),
            0);
}

}  // namespace
}  // namespace hbm::bootstrap
