// Groups whose ranks share no MPI world: their collectives over TCP links, next to real MPI.
#include "communicator/mpi/world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <string>

#include "communicator/mpi/connect.h"
#include "expect_error.h"
#include "file_store.h"
#include "mpi_ranks.h"
#include "nodes_talk.h"
#include "seeds.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kStagingBytes = 16 << 20;

// Draws the seed of a group that this process is not in, so that all processes draw the same seeds.
void skip_talk() { test_seed(); }

// Runs a conversation in a new group of the ranks of `layout`, of which this process is `rank`.
void talk(const Rank& process, int rank, const std::string& name, const std::string& layout) {
  NodesTalk conversation({rank, static_cast<int>(layout.size()), process.directory}, name, layout,
                         kStagingBytes);
  conversation->say_each_once();
  conversation->say(10);
  conversation->part();
}

// The processes have the nodes a, a, b, b. The even and the odd ones form a world each.
TEST(MpiWorlds, TwoGroupsOfTheirOwnFormOneGroup) {
  run_ranks(4, [](const Rank& process) {
    talk(process, process.rank / 2, process.rank % 2 == 0 ? "even" : "odd", "ab");
    talk(process, process.rank, "all", "aabb");
    EXPECT_EQ(World::current()->size(), 2);
    talk(process, process.rank, "again", "aabb");
    if (process.rank > 0) talk(process, process.rank - 1, "part", "abb");
  });
}

// Process 2 comes after processes 0 and 1 have started MPI, and is killed. Process 3 then takes its
// place. Neither starts MPI.
TEST(MpiWorlds, ANewcomerJoinsAndItsSuccessorToo) {
  constexpr int kVictim = 2;
  // For all that comes before the successor joins.
  static constexpr std::chrono::minutes kWhole{2};
  const auto body = [](const Rank& process) {
    FileStore store(process.directory);
    const auto limit = steady_clock::now() + kWhole;
    if (process.rank < 2) {
      talk(process, process.rank, "old", "ab");
    } else {
      skip_talk();
    }
    if (process.rank < 3) {
      NodesTalk three({process.rank, 3, process.directory}, "three", "abc", kStagingBytes);
      three->say_each_once();
      three->part();
      if (process.rank == kVictim) {
        EXPECT_EQ(World::current(), nullptr);
        raise(SIGKILL);
      }
      // The death itself, or the report of the other survivor.
      const std::string text = text_of(three.run(three.communicator().barrier(three.next())));
      EXPECT_NE(text.find("rank 2 (pid "), std::string::npos) << text;
      EXPECT_NE(text.find("has died"), std::string::npos) << text;
      talk(process, process.rank, "survivors", "ab");
      store.set("survived", "", limit);
    } else {
      skip_talk();
      skip_talk();
      EXPECT_TRUE(bootstrap::await_keys(store, {"survived"}, limit));
    }
    const int rank = process.rank == 3 ? 2 : process.rank;
    talk(process, rank, "successor", "abc");
    if (process.rank == 3) {
      EXPECT_EQ(World::current(), nullptr);
    }
  };
  run_ranks(4, body, {kVictim});
}

}  // namespace
}  // namespace hbm::communicator::mpi
