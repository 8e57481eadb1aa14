// How the ranks of a group meet in the store, before MPI is there.
#include "mpi/meeting.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "fake_store.h"

namespace hbm::mpi {
namespace {

using std::chrono::milliseconds;

Deadline in(milliseconds time) { return std::chrono::steady_clock::now() + time; }

Member member(int world_rank = -1, int world_size = 0, const std::string& world_id = "") {
  Member made;
  made.version = "1.0";
  made.host = "host";
  made.pid = 42;
  made.node = "node";
  made.chunk_bytes = "4096";
  made.world_id = world_id;
  made.world_rank = world_rank;
  made.world_size = world_size;
  return made;
}

// Each rank on a thread of its own: act(rank).
void on_ranks(int size, const std::function<void(int)>& act) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(act, rank);
  for (std::thread& rank : ranks) rank.join();
}

TEST(Meeting, EveryRankGetsEveryRecord) {
  FakeStore store;
  on_ranks(4, [&](int rank) {
    Member self = member(rank, 4, "hbm1");
    self.pid = 100 + rank;
    self.node = "node" + std::to_string(rank / 2);
    const Meeting meeting = meet(store, self, rank, 4, "group g", in(milliseconds(60'000)));
    ASSERT_EQ(meeting.members.size(), 4u);
    for (int r = 0; r < 4; ++r) {
      const Member& found = meeting.members[static_cast<size_t>(r)];
      EXPECT_EQ(found.version, "1.0");
      EXPECT_EQ(found.host, "host");
      EXPECT_EQ(found.pid, 100 + r);
      EXPECT_EQ(found.chunk_bytes, "4096");
      EXPECT_EQ(found.world_id, "hbm1");
      EXPECT_EQ(found.world_rank, r);
      EXPECT_EQ(found.world_size, 4);
    }
    EXPECT_EQ(nodes_of(meeting.members), (std::vector<int>{0, 0, 1, 1}));
  });
}

TEST(Meeting, ASecondOneIsToldFromTheFirst) {
  FakeStore store;
  on_ranks(3, [&](int rank) {
    std::vector<std::string> prefixes;
    for (int round = 0; round < 5; ++round) {
      Member self = member();
      self.pid = round;
      const Meeting meeting = meet(store, self, rank, 3, "group g", in(milliseconds(60'000)));
      for (const Member& found : meeting.members) EXPECT_EQ(found.pid, round);
      for (const std::string& earlier : prefixes) EXPECT_NE(meeting.prefix, earlier);
      prefixes.push_back(meeting.prefix);
    }
  });
}

TEST(Meeting, NamesTheRanksThatDidNotCome) {
  FakeStore store;
  on_ranks(4, [&](int rank) {
    if (rank % 2 == 1) return;
    expect_error(ErrorKind::kTimeout,
                 {"rank " + std::to_string(rank) + " of group g met 2 of 4", "missing ranks: 1, 3"},
                 [&] { meet(store, member(), rank, 4, "group g", in(milliseconds(200))); });
  });
}

TEST(Meeting, VersionsAndChunksMustAgree) {
  const auto differ = [](const std::string& part, const std::function<void(Member&)>& change) {
    FakeStore store;
    on_ranks(3, [&](int rank) {
      Member self = member();
      if (rank == 1) change(self);
      expect_error(ErrorKind::kMismatch, {part, "group g", "rank 0 has", "rank 1 has"},
                   [&] { meet(store, self, rank, 3, "group g", in(milliseconds(60'000))); });
    });
  };
  differ("the version of torch_hbmcomm", [](Member& self) { self.version = "1.1"; });
  differ("the staging chunk", [](Member& self) { self.chunk_bytes = "8192"; });
}

TEST(Meeting, NodesAreNumberedByFirstAppearance) {
  std::vector<Member> members(5, member());
  members[1].node = members[4].node = "z";
  members[3].node = "a";
  EXPECT_EQ(nodes_of(members), (std::vector<int>{0, 1, 0, 2, 1}));
}

TEST(Meeting, AProcessIntroducesItself) {
  const Member self = introduce("1.0", 8192, /*needs_mpi=*/false);
  EXPECT_EQ(self.version, "1.0");
  EXPECT_EQ(self.pid, getpid());
  EXPECT_EQ(self.chunk_bytes, "8192");
  EXPECT_EQ(self.node, node_key());
  EXPECT_FALSE(self.host.empty());
  EXPECT_EQ(self.world_rank, -1);
}

TEST(Meeting, HbmcommNodeIdForcesRanksApart) {
  const std::string before = node_key();
  setenv("HBMCOMM_NODE_ID", "b", 1);
  EXPECT_NE(node_key(), before);
  unsetenv("HBMCOMM_NODE_ID");
  EXPECT_EQ(node_key(), before);
}

TEST(Connect, RefusesRanksWithoutACommonWorld) {
  const std::vector<std::vector<Member>> groups = {
      {member(0, 2, "a"), member()},           // one rank initialised MPI, one did not
      {member(0, 1, "a"), member(0, 1, "b")},  // two worlds
      {member(0, 2, "a"), member(1, 3, "a")},  // two sizes
      {member(0, 1, ""), member(0, 1, "")},    // the same rank twice: each has a world of its own
  };
  for (const auto& members : groups) {
    expect_error(
        ErrorKind::kUnavailable, {"group g", "do not share an MPI world", "rank 1: "}, [&] {
          connect(std::make_shared<FakeStore>(), members, 0, "group g", in(milliseconds(60'000)));
        });
  }
}

TEST(Connect, WaitsForTheWorldsName) {
  expect_error(ErrorKind::kTimeout, {"rank 0 of group g did not name the MPI world"}, [] {
    connect(std::make_shared<FakeStore>(), {member(), member()}, 1, "group g",
            in(milliseconds(20)));
  });
}

}  // namespace
}  // namespace hbm::mpi
