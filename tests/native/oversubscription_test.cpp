// The ranks and processors of a machine, and the chunk of a group that depends on them.
#include "communicator/connect/oversubscription.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "communicator/connect/connect.h"
#include "expect_error.h"
#include "file_store.h"
#include "forked_ranks.h"
#include "memory/control_group.h"

namespace hbm::communicator::connect {
namespace {

using bootstrap::Member;

constexpr uint64_t kStagingBytes = uint64_t{1} << 30;
constexpr size_t kKiB = 1024;

std::vector<int> allowed_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

void run_on(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(cpu), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
}

Member member(const std::string& processors, const std::string& most_ranks = "1") {
  Member made;
  made.processors = processors;
  made.most_ranks = most_ranks;
  return made;
}

GroupConnection connected(const ForkedRank& rank, uint64_t staging_bytes = kStagingBytes) {
  const auto store = std::make_shared<FileStore>(rank.directory);
  const auto patience = std::chrono::minutes(1);
  return connect({.store = store,
                  .job_store = store,
                  .global_ranks = {},
                  .heartbeat = patience,
                  .rank = rank.rank,
                  .size = rank.size,
                  .group = "group g",
                  .deadline = std::chrono::steady_clock::now() + patience,
                  .version = "test",
                  .parameter_server = "",
                  .policy = memory::Policy::kDdr,
                  .staging_bytes = staging_bytes});
}

TEST(Processors, MatchTheThreadsAffinity) {
  const std::vector<int> all = allowed_cpus();
  EXPECT_EQ(count_processors({allowed_processors()}), all.size());
  run_forked([&] {
    run_on(all.back());
    const std::string mask = allowed_processors();
    EXPECT_EQ(mask.size(), static_cast<size_t>(all.back()) / 4 + 1);
    EXPECT_EQ(mask.back(), "1248"[all.back() % 4]);
    EXPECT_EQ(count_processors({mask}), 1u);
  });
}

TEST(Processors, OfSeveralMasksCountOnce) {
  EXPECT_EQ(count_processors({}), 0u);
  EXPECT_EQ(count_processors({"", "f"}), 4u);
  EXPECT_EQ(count_processors({"3", "6", "001"}), 4u);
  EXPECT_EQ(count_processors({"ff", "0ff"}), 12u);
}

TEST(ProcessorDemand, HasTheRanksAndTheProcessorsOfOneMachine) {
  const std::vector<Member> members = {member("3"), member("f"), member("3"), member("3")};
  EXPECT_TRUE(processor_demand({0, 2, 3}, members).oversubscribed());
  EXPECT_FALSE(processor_demand({0, 2}, members).oversubscribed());
  EXPECT_FALSE(processor_demand({0, 1, 2, 3}, members).oversubscribed());
  const std::vector<Member> bound = {member("1"), member("2"), member("4"), member("8")};
  EXPECT_FALSE(processor_demand({0, 1, 2, 3}, bound).oversubscribed());
}

// Ranks of one control group share its quota. Ranks of two control groups have the sum of both
// quotas.
TEST(ProcessorDemand, HasNoMoreProcessorsThanItsControlGroupsLeave) {
  const auto with_quotas = [](const std::vector<std::string>& quotas) {
    std::vector<Member> members;
    for (const std::string& quota : quotas) {
      members.push_back(member("f"));
      members.back().quota = quota;
    }
    return members;
  };
  const auto shared = with_quotas({"2 17", "2 17", "2 17"});
  EXPECT_EQ(usable_processors({0, 1, 2}, shared), 2u);
  EXPECT_TRUE(processor_demand({0, 1, 2}, shared).oversubscribed());
  EXPECT_FALSE(processor_demand({0, 1}, shared).oversubscribed());
  EXPECT_EQ(usable_processors({0, 1}, with_quotas({"1 17", "2 18"})), 3u);
  EXPECT_EQ(usable_processors({0, 1}, with_quotas({"9 17", "9 18"})), 4u) << "the masks bound it";
  EXPECT_EQ(usable_processors({0, 1}, with_quotas({"1 17", ""})), 4u) << "one has no quota";
}

TEST(ProcessorDemand, CountsTheRanksOfOtherGroupsOnAllOfItsRanks) {
  const std::vector<Member> members = {member("3"), member("3", "8")};
  const ProcessorDemand demand = processor_demand({0, 1}, members);
  EXPECT_EQ(demand.ranks, 8);
  EXPECT_EQ(demand.processors, 2u);
  run_forked([] {
    EXPECT_EQ(most_ranks(), 1);
    for (const int ranks : {1, 8, 2}) count_group(ranks);
    EXPECT_EQ(most_ranks(), 8);
  });
}

TEST(ShmSlotChunk, IsLargerIfOversubscribedAndRoomIsLeft) {
  constexpr uint64_t kSegmentBytes = uint64_t{1} << 40;
  EXPECT_EQ(shm_slot_chunk(kStagingBytes, kSegmentBytes, false), 128 * kKiB);
  EXPECT_EQ(shm_slot_chunk(kStagingBytes, kSegmentBytes, true), 1024 * kKiB);
  EXPECT_EQ(shm_slot_chunk(2048 * kKiB, kSegmentBytes, true), 256 * kKiB);
  EXPECT_EQ(shm_slot_chunk(2048 * kKiB, kSegmentBytes, false), 128 * kKiB);
  EXPECT_EQ(shm_slot_chunk(64 * kKiB, kSegmentBytes, true), 4 * kKiB);
  EXPECT_EQ(shm_slot_chunk(kStagingBytes, 4096 * kKiB, true), 64 * kKiB);
  EXPECT_EQ(shm_slot_chunk(kStagingBytes, 4096 * kKiB, false), 64 * kKiB);
  EXPECT_EQ(shm_slot_chunk(kStagingBytes, 1024 * kKiB, true), 16 * kKiB);
}

// A segment of 4 MiB has room for the slots of three groups.
TEST(ShmSlotChunk, FitsTheSmallestSegmentOfOversubscribedRanks) {
  const int cpu = allowed_cpus().front();
  run_forked_ranks(2, [&](const ForkedRank& rank) {
    run_on(cpu);
    if (rank.rank == 1) {
      const rlimit few = {.rlim_cur = 4096 * kKiB, .rlim_max = 4096 * kKiB};
      ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
    }
    std::vector<GroupConnection> groups;
    for (int group = 0; group < 3; ++group) {
      groups.push_back(connected(rank));
      EXPECT_TRUE(groups.back().oversubscribed);
      EXPECT_LT(groups.back().communicator->memory().slots_bytes, 4096 / 4 * kKiB);
    }
    for (const GroupConnection& made : groups) made.peers->stop();
  });
}

// If the ranks share a processor, their slots take a little more than 4 MiB. If each rank has its
// own processor, its slots take a little more than 1 MiB.
TEST(ProcessorDemand, DecidesWhatItsGroupsStage) {
  const std::vector<int> cpus = allowed_cpus();
  for (const bool together : {true, false}) {
    if (!together && (cpus.size() < 2 || memory::core_quota().cores < 2)) continue;
    run_forked_ranks(2, [&](const ForkedRank& rank) {
      run_on(together || rank.rank == 0 ? cpus.front() : cpus.back());
      const GroupConnection made = connected(rank);
      EXPECT_EQ(made.oversubscribed, together);
      const size_t region = made.communicator->memory().slots_bytes;
      EXPECT_GT(region, (together ? 4096 : 1024) * kKiB);
      EXPECT_LT(region, (together ? 4096 : 1024) * kKiB + 128 * kKiB);
      made.peers->stop();
    });
  }
}

// Oversubscribed ranks compute their slot chunk from staging_bytes. So staging_bytes must be equal
// on all ranks, even if both values give the same chunk over MPI.
TEST(ProcessorDemand, HasOneStagingBytes) {
  const int cpu = allowed_cpus().front();
  run_forked_ranks(2, [&](const ForkedRank& rank) {
    run_on(cpu);
    expect_error(
        ErrorKind::kMismatch,
        {"staging_bytes (the option, or HBMCOMM_STAGING_BYTES) differs", "rank 0 has 1073741824"},
        [&] { connected(rank, rank.rank == 0 ? kStagingBytes : kStagingBytes / 256); });
  });
}

}  // namespace
}  // namespace hbm::communicator::connect
