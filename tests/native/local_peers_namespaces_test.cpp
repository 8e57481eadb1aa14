// Ranks in namespaces of their own, as in containers, and the socket files by which they
// meet.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "communicator/shm/local_peers.h"
#include "communicator/shm/peer_socket.h"
#include "communicator/shm/shm_group.h"
#include "expect_error.h"
#include "file_store.h"
#include "forked_ranks.h"

namespace hbm::communicator::shm {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

bootstrap::KeyValue::Deadline in(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

std::set<std::string> socket_files(const std::string& directory) {
  std::set<std::string> found;
  for (const auto& file : fs::directory_iterator(directory)) {
    const std::string name = file.path().filename();
    if (name.starts_with("hbmcomm-")) found.insert(name);
  }
  return found;
}

bool enter(int namespaces) { return unshare(namespaces) == 0; }

bool enter_with_own_shared_memory(int namespaces) {
  return enter(namespaces | CLONE_NEWNS) &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", "/dev/shm", "tmpfs", 0, nullptr) == 0;
}

bool permitted(const std::function<bool()>& isolate) {
  return run_forked([&] { ASSERT_TRUE(isolate()); }) == 0;
}

LocalPeers explore_as(const ForkedRank& rank) {
  PeerListener listener;
  const auto store = std::make_shared<FileStore>(rank.directory);
  const auto rendezvous =
      bootstrap::meet(store, rank.rank, rank.size, "group g", in(milliseconds(60'000)), [&] {
        bootstrap::Member self = bootstrap::introduce("1.0", 4096);
        self.segment = "ddr";
        self.listener = listener.name();
        return self;
      });
  return explore(rendezvous, listener,
                 memory::SharedSegment::create(memory::Policy::kDdr, 64 << 20),
                 /*chunk_bytes=*/4096);
}

// Ranks 2 and 3 call `isolate` before they look for local peers. Expects that each rank finds the
// same nodes: rank r on node node_of[r].
void expect_nodes(const std::function<bool()>& isolate, const std::vector<int>& node_of) {
  if (!permitted(isolate)) GTEST_SKIP() << "namespaces are not permitted here";
  const int failures = run_forked([&] {
    ASSERT_TRUE(enter_with_own_shared_memory(0));  // other programs use the machine's /dev/shm
    run_forked_ranks(4, [&](const ForkedRank& rank) {
      if (rank.rank >= 2) {
        ASSERT_TRUE(isolate());
      }
      EXPECT_EQ(explore_as(rank).node_of, node_of);
    });
    EXPECT_TRUE(socket_files("/dev/shm").empty()) << "left behind";
  });
  EXPECT_EQ(failures, 0);
}

TEST(Namespaces, OtherNetworksWithACommonDirectoryAreOneNode) {
  expect_nodes([] { return enter(CLONE_NEWNET); }, {0, 0, 0, 0});
}

TEST(Namespaces, WithoutACommonDirectoryAreSeveralNodes) {
  expect_nodes([] { return enter_with_own_shared_memory(CLONE_NEWNET); }, {0, 0, 1, 2});
}

TEST(Namespaces, HbmcommSocketDirNamesACommonDirectory) {
  char directory[] = "/tmp/hbm_sockets_XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  setenv("HBMCOMM_SOCKET_DIR", directory, 1);
  expect_nodes([] { return enter_with_own_shared_memory(CLONE_NEWNET); }, {0, 0, 0, 0});
  unsetenv("HBMCOMM_SOCKET_DIR");
  EXPECT_TRUE(socket_files(directory).empty());
  fs::remove_all(directory);
}

TEST(Namespaces, MissingSocketDirFailsOnAllRanks) {
  if (!permitted([] { return enter(CLONE_NEWNET); })) GTEST_SKIP() << "not permitted";
  run_forked_ranks(2, [](const ForkedRank& rank) {
    if (rank.rank == 1) {
      ASSERT_TRUE(enter(CLONE_NEWNET));
      setenv("HBMCOMM_SOCKET_DIR", "/nowhere", 1);
    }
    expect_error(ErrorKind::kUnavailable, {"/nowhere"}, [&] { explore_as(rank); });
  });
}

TEST(Namespaces, DeathsInOtherNamespacesAreDetected) {
  const auto isolate = [] { return enter_with_own_shared_memory(CLONE_NEWPID | CLONE_NEWIPC); };
  if (!permitted(isolate)) GTEST_SKIP() << "namespaces are not permitted here";
  run_forked_ranks(2, [&](const ForkedRank& rank) {
    if (rank.rank == 1) {
      ASSERT_TRUE(isolate());
      EXPECT_EQ(run_forked([&] { explore_as(rank); }), 0);
      return;
    }
    const LocalPeers found = explore_as(rank);
    ASSERT_EQ(found.node_of, (std::vector<int>{0, 0}));
    const auto deadline = in(milliseconds(60'000));
    while (!is_dead(found.at[1]->pidfd.get()) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(is_dead(found.at[1]->pidfd.get()));
  });
}

class SocketFiles : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(directory_.data()), nullptr); }
  void TearDown() override { fs::remove_all(directory_); }

  std::string directory_ = "/tmp/hbm_sockets_XXXXXX";
};

TEST_F(SocketFiles, AreReachedAndRemoved) {
  {
    const SocketFile file(directory_, "a");
    EXPECT_EQ(socket_files(directory_).size(), 1u);
    std::error_code failure;
    EXPECT_TRUE(connect_to_file(directory_, "a", failure)) << failure.message();
    EXPECT_FALSE(connect_to_file(directory_, "b", failure));
    EXPECT_EQ(failure, std::errc::no_such_file_or_directory);
  }
  EXPECT_TRUE(socket_files(directory_).empty());
}

TEST_F(SocketFiles, OfKilledProcessesAreRemovedLater) {
  const int status = run_forked([this] {
    const SocketFile file(directory_, "killed");
    raise(SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  ASSERT_EQ(socket_files(directory_).size(), 1u);
  const SocketFile alive(directory_, "alive");
  const SocketFile next(directory_, "next");
  EXPECT_EQ(socket_files(directory_),
            (std::set<std::string>{"hbmcomm-alive.socket", "hbmcomm-next.socket"}));
}

TEST_F(SocketFiles, OldDraftsAreRemoved) {
  const fs::path draft = directory_ + "/hbmcomm-a.socket.draft";
  {
    listen_at(file_address(draft));
  }
  {
    const SocketFile young(directory_, "b");
  }
  EXPECT_EQ(socket_files(directory_).size(), 1u);
  fs::last_write_time(draft, fs::file_time_type::clock::now() - std::chrono::minutes(2));
  {
    const SocketFile old(directory_, "b");
  }
  EXPECT_TRUE(socket_files(directory_).empty());
}

TEST_F(SocketFiles, NeedADirectoryAndAShortName) {
  expect_error(ErrorKind::kUnavailable, {"cannot listen", "/nowhere/hbmcomm-a"},
               [] { SocketFile("/nowhere", "a"); });
  expect_error(ErrorKind::kInvalid, {"too long", "HBMCOMM_SOCKET_DIR"},
               [] { SocketFile("/" + std::string(200, 'd'), "a"); });
}

}  // namespace
}  // namespace hbm::communicator::shm
