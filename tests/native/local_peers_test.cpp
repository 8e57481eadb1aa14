// The ranks that share a node. In most tests, ranks are processes.
#include "communicator/shm/local_peers.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "communicator/shm/descriptor_exchange.h"
#include "communicator/shm/shm_group.h"
#include "expect_error.h"
#include "fake_store.h"
#include "file_store.h"
#include "forked_ranks.h"
#include "memory_fixture.h"  // suppresses ThreadSanitizer's reports about memkind

namespace {
std::function<void()> between_checks;  // of the next recvmsg(), which then finds the end
}  // namespace

// Takes the place of the C library's function.
extern "C" ssize_t recvmsg(int socket, msghdr* message, int flags) {
  if (const auto happen = std::exchange(between_checks, nullptr)) {
    happen();
    return 0;
  }
  return syscall(SYS_recvmsg, socket, message, flags);
}

namespace hbm::communicator::shm {
namespace {

using memory::SharedSegment;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{60'000};
constexpr size_t kSegmentBytes = size_t{64} << 20;

bootstrap::KeyValue::Deadline in(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

// A rank with a segment of its own.
struct Explorer {
  Explorer(std::shared_ptr<bootstrap::KeyValue> used, int rank_in_group, int group_size)
      : store(std::move(used)), rank(rank_in_group), size(group_size) {}
  explicit Explorer(const ForkedRank& forked)
      : Explorer(std::make_shared<FileStore>(forked.directory), forked.rank, forked.size) {}

  // Meets the other ranks, calls `hold`, and finds the local peers.
  LocalPeers explore(const std::function<void()>& hold = [] {}) {
    PeerListener listener;
    const auto rendezvous = bootstrap::meet(store, rank, size, "group g", in(patience), [&] {
      bootstrap::Member self = bootstrap::introduce("1.0", 4096);
      self.segment = segment_name;
      self.listener = is_reachable ? listener.name() : "nobody";
      return self;
    });
    participant = rendezvous.participant;
    hold();
    return shm::explore(rendezvous, listener, segment, /*chunk_bytes=*/4096);
  }

  // Each rank writes to its segment and to the segments of its local peers, and all ranks read the
  // values.
  void expect_shared(const LocalPeers& found) {
    auto* const cells =
        static_cast<long*>(segment->allocate_reserved(static_cast<size_t>(size) * 8));
    cells[rank] = 1000 + rank;
    const auto offsets = exchange("offset", std::to_string(segment->offset_of(cells)));
    const auto cells_of = [&](size_t r) {
      return reinterpret_cast<long*>(found.at[r]->memory->base() + std::stoul(offsets[r]));
    };
    for (size_t r = 0; r < found.at.size(); ++r) {
      if (!found.at[r]) continue;
      EXPECT_EQ(cells_of(r)[r], 1000 + static_cast<long>(r));
      EXPECT_FALSE(is_dead(found.at[r]->pidfd.get()));
      cells_of(r)[rank] = 2000 + rank;
    }
    exchange("written", "");
    for (size_t r = 0; r < found.at.size(); ++r) {
      if (found.at[r]) {
        EXPECT_EQ(cells[r], 2000 + static_cast<long>(r));
      }
    }
    segment->free(cells);
  }

  std::vector<std::string> exchange(const std::string& step, const std::string& text) {
    return gather(participant, step, bootstrap::everyone(size), [&] { return text; });
  }

  std::shared_ptr<bootstrap::KeyValue> store;
  int rank;
  int size;
  milliseconds patience = kTimeout;
  std::string segment_name = "ddr";
  bool is_reachable = true;  // other ranks can connect to this rank's listener
  std::shared_ptr<SharedSegment> segment =
      SharedSegment::create(memory::Policy::kDdr, kSegmentBytes);
  bootstrap::Participant participant;
};

void expect_nodes(const LocalPeers& found, int rank, const std::vector<int>& node_of) {
  EXPECT_EQ(found.node_of, node_of);
  ASSERT_EQ(found.at.size(), node_of.size());
  const auto self = static_cast<size_t>(rank);
  for (size_t r = 0; r < node_of.size(); ++r) {
    EXPECT_EQ(found.at[r] != nullptr, r != self && node_of[r] == node_of[self]) << "rank " << r;
  }
}

class Explore : public testing::TestWithParam<int> {};

TEST_P(Explore, RanksOfOneMachineAreOneNode) {
  run_forked_ranks(GetParam(), [](const ForkedRank& forked) {
    Explorer rank(forked);
    const LocalPeers found = rank.explore();
    expect_nodes(found, rank.rank, std::vector<int>(static_cast<size_t>(rank.size), 0));
    rank.expect_shared(found);
  });
}

TEST_P(Explore, HbmcommNodeIdForcesRanksApart) {
  run_forked_ranks(GetParam(), [](const ForkedRank& forked) {
    setenv("HBMCOMM_NODE_ID", std::to_string(forked.rank % 3).c_str(), 1);
    Explorer rank(forked);
    std::vector<int> node_of;
    for (int r = 0; r < rank.size; ++r) node_of.push_back(r % 3);
    const LocalPeers found = rank.explore();
    expect_nodes(found, rank.rank, node_of);
    rank.expect_shared(found);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Explore, testing::Values(1, 2, 4, 8));

TEST(Explore, RanksOfDifferentUsersAreApart) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  for (const int ordinary : {0, 1}) {
    run_forked_ranks(2, [&](const ForkedRank& forked) {
      std::filesystem::permissions(forked.directory, std::filesystem::perms::all);
      const std::string lock = forked.directory / "lock";
      const Descriptor made(open(lock.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
      ASSERT_EQ(fchmod(made.get(), 0666), 0);
      if (forked.rank == ordinary) {
        ASSERT_EQ(setresuid(1235, 1235, 1235), 0);
      }
      Explorer rank(forked);
      expect_nodes(rank.explore(), rank.rank, {0, 1});
    });
  }
}

TEST(Explore, RanksMayBeThreads) {
  const auto explore_on_threads = [] {
    const auto store = std::make_shared<FakeStore>();
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r) {
      threads.emplace_back([&store, r] {
        Explorer rank(store, r, 4);
        rank.segment_name = std::to_string(r);
        const LocalPeers found = rank.explore();
        expect_nodes(found, r, {0, 0, 0, 0});
        rank.exchange("done", "");
      });
    }
    for (std::thread& thread : threads) thread.join();
    // Counts neither the keys of the test nor keys that ranks publish only if a step takes long.
    const std::regex others("/(done|calls|mapped)/[0-9]+$");
    const auto own_keys = std::ranges::count_if(
        store->keys(), [&](const std::string& key) { return !std::regex_search(key, others); });
    EXPECT_LE(own_keys, 4 + 4);
  };
  EXPECT_EQ(run_forked(explore_on_threads), 0);  // in a child, because later tests fork
}

TEST(Explore, PublishesRegionsAtTheFirstMeeting) {
  run_forked_ranks(4, [](const ForkedRank& forked) {
    Explorer rank(forked);
    const LocalPeers first = rank.explore();
    ASSERT_TRUE(first.region);
    EXPECT_EQ(first.region->local_size(), 4u);
    for (size_t r = 0; r < 4; ++r) {
      const std::byte* const base =
          first.at[r] ? first.at[r]->memory->base() : rank.segment->base();
      EXPECT_EQ(reinterpret_cast<const Control*>(base + first.regions[r])->magic, kRegionMagic);
    }
    EXPECT_FALSE(rank.explore().region);
    rank.exchange("done", "");
  });
}

TEST(Explore, UnreachableRankIsOnAnotherNode) {
  run_forked_ranks(4, [](const ForkedRank& forked) {
    Explorer rank(forked);
    rank.is_reachable = rank.rank != 2;
    const LocalPeers found = rank.explore();
    expect_nodes(found, rank.rank, {0, 0, 1, 0});
    EXPECT_FALSE(found.region);
    rank.expect_shared(found);
  });
}

TEST(Explore, FirstRankWarnsOnceOfUnsharedMemory) {
  run_forked_ranks(3, [](const ForkedRank& forked) {
    Explorer rank(forked);
    rank.is_reachable = rank.rank != 1;
    testing::internal::CaptureStderr();
    for (int group = 0; group < 2; ++group) expect_nodes(rank.explore(), rank.rank, {0, 1, 0});
    const std::string said = testing::internal::GetCapturedStderr();
    if (rank.rank != 0) {
      EXPECT_EQ(said, "");
      return;
    }
    constexpr size_t kTime = sizeof("2026-11-29T14:50:45.123Z");  // with the space after it
    const std::string warning = "[hbm] warn: ranks 0 and 1 of group g run on one machine (";
    EXPECT_EQ(said.find(warning), kTime) << said;
    EXPECT_EQ(said.find("warn", kTime + warning.size()), std::string::npos) << said;
    EXPECT_NE(said.find(") and do not share memory"), std::string::npos) << said;
  });
}

TEST(Explore, RankThatCannotMapIsOnAnotherNode) {
  if (!memory::kSpaceIsOurs) GTEST_SKIP() << "a sanitizer needs the address space";
  run_forked_ranks(4, [](const ForkedRank& forked) {
    Explorer rank(forked);
    const LocalPeers found = rank.explore([&] {
      if (rank.rank != 1) return;
      memory::set_limit(RLIMIT_AS, memory::mapped_bytes() + kSegmentBytes / 4);
    });
    expect_nodes(found, rank.rank, {0, 1, 0, 0});
    EXPECT_FALSE(found.region);
    rank.expect_shared(found);
  });
}

TEST(Explore, FreesRegionsIfARankCanMapNone) {
  if (!memory::kSpaceIsOurs) GTEST_SKIP() << "a sanitizer needs the address space";
  run_forked_ranks(2, [](const ForkedRank& forked) {
    Explorer rank(forked);
    std::vector<uint64_t> in_use;
    for (int group = 0; group < 3; ++group) {
      const LocalPeers found = rank.explore([&] {
        if (rank.rank != 1) return;
        memory::set_limit(RLIMIT_AS, memory::mapped_bytes() + kSegmentBytes / 4);
      });
      expect_nodes(found, rank.rank, {0, 1});
      in_use.push_back(rank.segment->stats().in_use_bytes);
    }
    EXPECT_EQ(in_use, std::vector<uint64_t>(3, in_use.front()));
  });
}

TEST(Explore, NamesARankThatNeverComes) {
  run_forked_ranks(3, [](const ForkedRank& forked) {
    Explorer rank(forked);
    rank.patience = milliseconds(3000);
    if (rank.rank != 1) {
      expect_error(ErrorKind::kTimeout, {"group g met 2 of 3", "missing ranks: 1"},
                   [&] { rank.explore(); });
    } else {
      EXPECT_THROW(rank.explore([] { throw std::exception(); }), std::exception);
    }
  });
}

// A store that kills its process once the process has written a key of `step`, or has added itself
// to the counter of `step`.
class DeadlyStore final : public bootstrap::KeyValue {
 public:
  DeadlyStore(std::shared_ptr<bootstrap::KeyValue> store, std::string step)
      : store_(std::move(store)), step_("/" + std::move(step) + "/") {}

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    store_->set(key, value, deadline);
    if (key.find(step_) != std::string::npos) raise(SIGKILL);
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    return store_->get(key, deadline);
  }
  bool has(const std::vector<std::string>& keys, Deadline deadline) override {
    return store_->has(keys, deadline);
  }
  long add(const std::string& key, long amount, Deadline deadline) override {
    const long sum = store_->add(key, amount, deadline);
    if (key.find(step_) != std::string::npos) raise(SIGKILL);
    return sum;
  }
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override {
    const std::string found = store_->claim(key, value, deadline);
    if (key.find(step_) != std::string::npos) raise(SIGKILL);
    return found;
  }
  void remove(const std::vector<std::string>& keys) noexcept override { store_->remove(keys); }

 private:
  const std::shared_ptr<bootstrap::KeyValue> store_;
  const std::string step_;
};

TEST(Explore, NamesARankKilledInProgress) {
  for (const std::string step : {"rendezvous", "calls", "calls1"}) {
    const auto explore = [&step](const ForkedRank& forked) {
      Explorer rank(forked);
      rank.patience = milliseconds(3000);
      // If all ranks are reachable, they omit step "calls1".
      rank.is_reachable = step != "calls1" || rank.rank != 3;
      if (rank.rank == 1) rank.store = std::make_shared<DeadlyStore>(rank.store, step);
      try {
        rank.explore();
        ADD_FAILURE() << "rank " << rank.rank << " noticed nothing";
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_TRUE(text.find("missing ranks: 1.") != std::string::npos ||
                    text.find("exchange descriptors of memory with rank 1 (") != std::string::npos)
            << text;
      }
    };
    run_forked_ranks(4, explore, {1});
  }
}

// Returns the error of a rank that exchanges descriptors with rank 1, after `act` has used rank 1's
// end of the connection.
std::string error_of_exchange(const std::function<void(Descriptor)>& act) {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends.data()), 0);
  std::map<int, Descriptor> called;
  called.emplace(1, Descriptor(ends[0]));
  act(Descriptor(ends[1]));
  const bootstrap::Participant rank_0{
      std::make_shared<FakeStore>(), "g/", 0, 2, "group g", in(kTimeout)};
  PeerListener listener;
  Introduction own;
  own.memory = Descriptor(dup(ends[0]));
  own.pidfd = Descriptor(dup(ends[0]));
  try {
    shm::exchange(rank_0, own, std::move(called), listener, {{"key of rank 1", 1}});
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeer);
    return error.what();
  }
  return "";
}

TEST(Exchange, NamesTheCauseOfALostConnection) {
  const std::string lost =
      "rank 0 of group g could not exchange descriptors of memory with rank 1 ";
  std::vector<Descriptor> open;  // until the exchange ends
  EXPECT_EQ(error_of_exchange([&](Descriptor end) {
              shutdown(end.get(), SHUT_WR);
              open.push_back(std::move(end));
            }),
            lost + "(it closed the connection)");
  EXPECT_EQ(
      error_of_exchange([&](const Descriptor& end) { EXPECT_EQ(write(end.get(), "x", 1), 1); }),
      lost + "(it sent a packet of another size than 120 bytes)");
  Greeting stranger;
  std::string("another").copy(stranger.key.data(), stranger.key.size());
  const auto introduce = [&](const Descriptor& end, const std::vector<int>& descriptors) {
    std::string cause;
    EXPECT_EQ(send(end.get(), &stranger, sizeof(stranger), descriptors, cause), Delivery::kDone);
  };
  EXPECT_EQ(error_of_exchange([&](const Descriptor& end) { introduce(end, {end.get()}); }),
            lost + "(it sent 1 descriptors)");
  EXPECT_EQ(error_of_exchange([&](const Descriptor& end) { introduce(end, {0, 1}); }),
            lost + "(it is the process another, which is no peer)");
}

// The kernel checks for a packet, then for the end of the connection. Here the peer sends its
// packet and closes the connection between the two checks.
TEST(Exchange, ReceivesThePacketOfAPeerThatClosesTheConnection) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends.data()), 0);
  const Descriptor own(ends[0]);
  Descriptor peer(ends[1]);
  Greeting received;
  std::vector<Descriptor> descriptors;
  std::string cause;
  EXPECT_EQ(receive(own.get(), &received, sizeof(received), descriptors, cause), Delivery::kLater);
  between_checks = [&] {
    const Greeting greeting;
    ASSERT_EQ(send(peer.get(), &greeting, sizeof(greeting), {STDERR_FILENO}, cause),
              Delivery::kDone);
    peer = Descriptor();
  };
  EXPECT_EQ(receive(own.get(), &received, sizeof(received), descriptors, cause), Delivery::kDone)
      << cause;
  EXPECT_EQ(descriptors.size(), 1U);
  EXPECT_EQ(receive(own.get(), &received, sizeof(received), descriptors, cause), Delivery::kGone);
  EXPECT_EQ(cause, "it closed the connection");
}

// Allocates blocks until the segment has no room.
void fill(SharedSegment& segment) {
  for (size_t bytes = kSegmentBytes; bytes > 0; bytes /= 2) {
    try {
      for (;;) segment.allocate_reserved(bytes);
    } catch (const Error&) {
    }
  }
}

TEST(Explore, AFailureOfOneRankReachesAll) {
  run_forked_ranks(4, [](const ForkedRank& forked) {
    setenv("HBMCOMM_NODE_ID", forked.rank < 3 ? "a" : "b", 1);
    Explorer rank(forked);
    if (rank.rank == 1) {
      fill(*rank.segment);
      expect_error(ErrorKind::kExhausted, {"segment"}, [&] { rank.explore(); });
      return;
    }
    expect_error(ErrorKind::kUnavailable, {"rank 1 of group g cannot take part: ", "segment"},
                 [&] { rank.explore(); });
  });
}

TEST(Explore, ADeadLocalPeerIsDetected) {
  run_forked_ranks(
      2,
      [](const ForkedRank& forked) {
        Explorer rank(forked);
        const LocalPeers found = rank.explore();
        rank.expect_shared(found);
        if (rank.rank == 1) raise(SIGKILL);
        const auto deadline = in(kTimeout);
        while (!is_dead(found.at[1]->pidfd.get()) && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        EXPECT_TRUE(is_dead(found.at[1]->pidfd.get()));
      },
      {1});
}

TEST(Explore, AFurtherGroupNeedsNoSockets) {
  run_forked_ranks(4, [](const ForkedRank& forked) {
    Explorer rank(forked);
    const LocalPeers first = rank.explore();
    rank.segment = nullptr;  // the further group must not need a segment
    const LocalPeers again = rank.explore();
    EXPECT_EQ(again.at, first.at);
    EXPECT_EQ(again.node_of, first.node_of);
  });
}

TEST(Explore, RankWithoutMappingsMeetsOneWithMappings) {
  run_forked_ranks(4, [](const ForkedRank& forked) {
    Explorer rank(forked);
    LocalPeers first = rank.explore();
    if (rank.rank == 1 || rank.rank == 2) first = {};
    const LocalPeers again = rank.explore();
    expect_nodes(again, rank.rank, {0, 0, 0, 0});
    if (rank.rank == 0) {
      EXPECT_EQ(again.at[3], first.at[3]);
      EXPECT_NE(again.at[1], first.at[1]);
    }
    rank.expect_shared(again);
  });
}

TEST(Explore, ForkedChildHasNoKnownPeers) {
  run_forked_ranks(2, [](const ForkedRank& forked) {
    Explorer rank(forked);
    const LocalPeers found = rank.explore();
    const auto local_peer = found.at[static_cast<size_t>(1 - rank.rank)];
    remember_local_peer("key", local_peer);
    EXPECT_EQ(known_local_peer("key"), local_peer);
    EXPECT_EQ(run_forked([] { EXPECT_EQ(known_local_peer("key"), nullptr); }), 0);
    rank.exchange("done", "");
  });
}

TEST(Explore, FewDescriptorsInFlightAreEnough) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become a user with limits";
  run_forked_ranks(8, [](const ForkedRank& forked) {
    Explorer rank(forked);
    std::filesystem::permissions(forked.directory, std::filesystem::perms::all);
    const rlimit few{40, 40};  // limits this process's open descriptors, and the user's in flight
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    ASSERT_EQ(setuid(65534), 0);
    const LocalPeers found = rank.explore();
    expect_nodes(found, rank.rank, std::vector<int>(8, 0));
  });
}

TEST(PeerListener, TakesInNoStrangers) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  PeerListener listener;
  bootstrap::Member self = bootstrap::introduce("1.0", 4096);
  self.listener = listener.name();
  ASSERT_TRUE(PeerListener::call(self, self));
  EXPECT_EQ(listener.callers().size(), 1u);
  EXPECT_EQ(run_forked([&] {
              ASSERT_EQ(setuid(65534), 0);
              EXPECT_FALSE(PeerListener::call(self, self)) << "as root takes no other user in";
            }),
            0);
  EXPECT_TRUE(listener.callers().empty());
}

TEST(Partition, NodesConsistOfMutuallyMappedRanks) {
  EXPECT_EQ(partition({"0"}), (std::vector<int>{0}));
  EXPECT_EQ(partition({"01", "10"}), (std::vector<int>{0, 0}));
  EXPECT_EQ(partition({"01", "00"}), (std::vector<int>{0, 1})) << "one way only";
  EXPECT_EQ(partition({"0010", "0001", "1000", "0100"}), (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(partition({"011", "100", "100"}), (std::vector<int>{0, 0, 1})) << "not transitive";
}

}  // namespace
}  // namespace hbm::communicator::shm
