// Every collective, send and receive over real MPI: random conversations of 1 to 8 ranks.
#include "communicator/mpi/communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "collectives_conversation.h"
#include "mpi_ranks.h"
#include "seeds.h"

namespace hbm::communicator::mpi {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

// A group, and this rank's end of a conversation in it.
class Talk {
 public:
  Talk(const Rank& rank, const std::string& name, size_t chunk_bytes,
       std::chrono::microseconds round_trip = {})
      : group_(rank.group(name, chunk_bytes)),
        conversation_({.rank = rank.rank,
                       .size = rank.size,
                       .collectives = group_.communicator,
                       .ordered = group_.collectives,
                       .transfers = group_.transfers,
                       .sequence = &group_.sequence,
                       .sizes = {0, 1, 2, 13, 101, 1009, 20011, 96'000, chunk_bytes - 1,
                                 chunk_bytes, chunk_bytes + 1, 5 * chunk_bytes - 1},
                       .most_bytes = 500'000,
                       .memory = {private_memory}},
                      test_seed()) {
    group_.channel->round_trip = [round_trip] { return round_trip; };
  }

  Conversation* operator->() { return &conversation_; }

 private:
  Group group_;
  Conversation conversation_;
};

// With chunks of 512 bytes most operations take many rounds. With chunks of 96 KiB long messages
// use MPI's rendezvous protocol.
//
// Each rank takes another time for the link's round-trip time. So the ranks keep different numbers
// of rounds in flight, and some have none to spare.
void try_all(const Rank& rank) {
  const std::chrono::milliseconds distant(rank.rank % 2 == 0 ? 20 : rank.rank / 2);
  for (const size_t chunk_bytes : {512, 96 * 1024}) {
    for (const bool far : {false, true}) {
      const std::string name = std::to_string(chunk_bytes) + (far ? "-far" : "-near");
      Talk talk(rank, name, chunk_bytes, far ? distant : std::chrono::milliseconds(0));
      talk->say_each_once();
      talk->say(rank.size > 4 || kSlow ? 10 : 50);
      talk->part();
    }
  }
}

class MpiCollectives : public testing::TestWithParam<int> {};

TEST_P(MpiCollectives, MatchPlainLoops) {
  if (kSlow && GetParam() > 4) GTEST_SKIP() << "no more threads in a rank than with fewer ranks";
  run_ranks(GetParam(), try_all);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiCollectives, testing::Values(1, 2, 3, 4, 8));

TEST(MpiCollectivesNodes, RanksOfTwoNodesInterleaved) {
  run_ranks(4, [](const Rank& rank) {
    setenv("HBMCOMM_NODE_ID", rank.rank % 2 == 0 ? "even" : "odd", 1);
    Talk talk(rank, "nodes", 4096);
    talk->say_each_once();
    talk->part();
  });
}

TEST(MpiCollectivesGroups, SubgroupsShareTheFirstGroupsWorld) {
  run_ranks(4, [](const Rank& rank) {
    Talk everyone(rank, "all", 4096);
    const Rank in_pair{{rank.rank / 2, 2, rank.directory}};
    Talk pair(in_pair, rank.rank % 2 == 0 ? "even" : "odd", 4096);
    pair->say_each_once();
    everyone->say_each_once();
    pair->say_each_once();
    pair->part();
    everyone->part();
  });
}

}  // namespace
}  // namespace hbm::communicator::mpi
