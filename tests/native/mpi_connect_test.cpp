// The preconditions of MPI, the MPI worlds that fit a group, and the nodes that may share memory in
// MPI.
#include "communicator/mpi/connect.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "expect_error.h"

namespace hbm::communicator::mpi {
namespace {

MpiState standing(int world_rank = -1, int world_size = 0, const std::string& world_id = "") {
  return {"node", "new", world_id, world_rank, world_size, {}, 0, ""};
}

TEST(NodeKey, HbmcommNodeIdForcesRanksApart) {
  const std::string before = node_key();
  setenv("HBMCOMM_NODE_ID", "b", 1);
  EXPECT_NE(node_key(), before);
  unsetenv("HBMCOMM_NODE_ID");
  EXPECT_EQ(node_key(), before);
}

TEST(MpiState, SurvivesEncodingAndDecoding) {
  const MpiState sent{"a node",
                      "new",
                      "",
                      3,
                      4,
                      {7, "boot", "1:2,3:4", "5:6", "8,9:1", false},
                      1234567890123456789,
                      "UCX_TLS=rc FI_PROVIDER=\"x\""};
  const MpiState found = decode(encode(sent));
  EXPECT_EQ(found.node, "a node");
  EXPECT_EQ(found.new_world, "new");
  EXPECT_EQ(found.world_id, "");
  EXPECT_EQ(found.world_rank, 3);
  EXPECT_EQ(found.world_size, 4);
  EXPECT_EQ(found.sharing.user, 7u);
  EXPECT_EQ(found.sharing.boot_id, "boot");
  EXPECT_EQ(found.sharing.namespaces, "1:2,3:4");
  EXPECT_EQ(found.sharing.shm_directory, "5:6");
  EXPECT_EQ(found.sharing.access, "8,9:1");
  EXPECT_FALSE(found.sharing.shares);
  EXPECT_EQ(found.group_number, 1234567890123456789u);
  EXPECT_EQ(found.risks, sent.risks);
}

SharingFacts sharing(unsigned user, const std::string& boot_id = "boot",
                     const std::string& namespaces = "n", bool shares = true) {
  return {user, boot_id, namespaces, "folder", "access", shares};
}

TEST(Preconditions, RanksOfOneMachineHaveOneUser) {
  expect_error(ErrorKind::kUnavailable,
               {"ranks 0 and 2 of group g", "different users (0 and 5)", "UCX_TLS=tcp,self"},
               [] { require_one_user({sharing(0), sharing(0), sharing(5)}, "group g"); });
  require_one_user({sharing(5), sharing(5)}, "group g");
  require_one_user({sharing(0), sharing(5, "another machine")}, "group g");
  require_one_user({sharing(0), sharing(5, "boot", "another container")}, "group g");
  require_one_user({sharing(0, "boot", "n", false), sharing(5, "boot", "n", false)}, "group g");
}

TEST(Preconditions, TheUsersOrderDecidesWhatUcxShares) {
  const char* const before = std::getenv("UCX_TLS");
  ASSERT_EQ(before, nullptr);
  EXPECT_TRUE(own_sharing_facts().shares);
  for (const char* chosen : {"^cma", "all", "tcp,sysv,self", "sm"}) {
    setenv("UCX_TLS", chosen, 1);
    EXPECT_TRUE(own_sharing_facts().shares) << chosen;
  }
  setenv("UCX_TLS", "tcp,self", 1);
  EXPECT_FALSE(own_sharing_facts().shares);
  unsetenv("UCX_TLS");
}

TEST(Preconditions, ShmFoldersAreCountedAndHaveRoom) {
  std::vector<SharingFacts> ranks(4, sharing(0));
  ranks[1].shm_directory = "another";
  ranks[2].boot_id = "another";
  EXPECT_EQ(sharing_shm_directory(ranks, 0), 2u);
  EXPECT_EQ(sharing_shm_directory(ranks, 1), 1u);
  require_shm_room(1);
  expect_error(ErrorKind::kUnavailable, {"/dev/shm has", "KiB left", "SIGBUS", "--shm-size"},
               [] { require_shm_room(size_t{1} << 40); });
}

TEST(Preconditions, RanksOfAnotherGroupOrNamespaceAreRefused) {
  std::vector<SharingFacts> ranks(3, sharing(0));
  EXPECT_FALSE(is_shut_out(ranks, 0));
  ranks[2].access = "another";
  for (const int rank : {0, 1, 2}) EXPECT_TRUE(is_shut_out(ranks, rank));
  ranks[2].boot_id = "another machine";
  for (const int rank : {0, 1, 2}) EXPECT_FALSE(is_shut_out(ranks, rank));
}

TEST(Preconditions, DescriptorsAreCounted) {
  require_descriptors(2);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{16, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  expect_error(ErrorKind::kUnavailable, {"this process can open", "more files", "ulimit -n"},
               [] { require_descriptors(2); });
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(MpiState, DifferentRisksNameTheirRanks) {
  std::vector<MpiState> ranks(3, standing());
  EXPECT_EQ(risks_of(ranks), "");
  ranks[1].risks = "UCX_TLS=rc";
  EXPECT_EQ(risks_of(ranks), "rank 1: UCX_TLS=rc");
  ranks[2].risks = "FI_PROVIDER=psm2";
  EXPECT_EQ(risks_of(ranks), "rank 1: UCX_TLS=rc; rank 2: FI_PROVIDER=psm2");
  for (MpiState& rank : ranks) rank.risks = "UCX_TLS=rc";
  EXPECT_EQ(risks_of(ranks), "UCX_TLS=rc");
}

TEST(MpiState, NodesOfOneKernelMayShareMemory) {
  const auto share = [](size_t rank, const std::string& last, bool shares) {
    std::vector<MpiState> ranks(3, standing());
    ranks[0].sharing = ranks[1].sharing = sharing(0, "boot", "n", shares);
    ranks[2].sharing = sharing(0, last, "n", shares);
    return nodes_share_memory(ranks, {0, 0, 1}, rank);
  };
  for (const size_t rank : {0, 2}) {
    EXPECT_TRUE(share(rank, "boot", true));
    EXPECT_FALSE(share(rank, "boot", false));
    EXPECT_FALSE(share(rank, "another", true));  // the other node has another kernel
  }
}

TEST(MpiState, NodesAreNumberedByFirstAppearance) {
  std::vector<MpiState> ranks(5, standing());
  ranks[1].node = ranks[4].node = "z";
  ranks[3].node = "a";
  EXPECT_EQ(nodes_of(ranks), (std::vector<int>{0, 1, 0, 2, 1}));
}

TEST(MpiState, AllOrNoRanksShareAWorld) {
  EXPECT_EQ(common_world({standing(), standing()}), CommonWorld::kNone);
  EXPECT_EQ(common_world({standing(2, 3, "a"), standing(0, 3, "a")}), CommonWorld::kOne);
}

TEST(MpiState, OtherRanksAreApart) {
  const std::vector<std::vector<MpiState>> groups = {
      {standing(0, 2, "a"), standing()},           // one rank initialised MPI, one did not
      {standing(), standing(0, 2, "a")},           // one did not, one initialised MPI
      {standing(0, 1, "a"), standing(0, 1, "b")},  // two worlds
      {standing(0, 2, "a"), standing(1, 3, "a")},  // two sizes
      {standing(0, 1, ""), standing(0, 1, "")},    // the same rank twice: each has its own world
  };
  for (const auto& ranks : groups) EXPECT_EQ(common_world(ranks), CommonWorld::kApart);
}

}  // namespace
}  // namespace hbm::communicator::mpi
