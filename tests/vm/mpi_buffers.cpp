// Ranks over real MPI, each on a NUMA node of its own, report where the buffers lie that they hand
// to MPI: the guest's half of test_mpi_buffers.py.
//
//   VM_RANKS=2 VM_POLICY=bind vm_mpi_buffers
//
// The program is linked with Comm::isend() and Comm::irecv() wrapped (CMakeLists.txt): what hbm
// calls notes each buffer and passes the call on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "communicator/mpi/channel.h"
#include "communicator/mpi/communicator.h"
#include "memory/cpu_binding.h"
#include "memory/staging.h"
#include "mpi_ranks.h"
#include "report.h"

namespace hbm::mpi {
namespace {

constexpr uint64_t kStagingBytes = 64 << 20;
constexpr size_t kChunkBytes = 256 << 10;
constexpr size_t kCount = 1 << 20;

std::mutex mutex;                      // guards `handed`
std::map<const void*, size_t> handed;  // address -> bytes, the most of all calls

void note(const void* data, size_t bytes) {
  const std::lock_guard lock(mutex);
  size_t& most = handed[data];
  most = std::max(most, bytes);
}

}  // namespace

// The linker's names for the functions and for their stand-ins.
extern "C" {
Request __real__ZN3hbm3mpi4Comm5isendEPKvmii(Comm* comm, const void* data, size_t bytes, int peer,
                                             int tag);
Request __real__ZN3hbm3mpi4Comm5irecvEPvmii(Comm* comm, void* data, size_t bytes, int peer,
                                            int tag);

Request __wrap__ZN3hbm3mpi4Comm5isendEPKvmii(Comm* comm, const void* data, size_t bytes, int peer,
                                             int tag) {
  note(data, bytes);
  return __real__ZN3hbm3mpi4Comm5isendEPKvmii(comm, data, bytes, peer, tag);
}

Request __wrap__ZN3hbm3mpi4Comm5irecvEPvmii(Comm* comm, void* data, size_t bytes, int peer,
                                            int tag) {
  note(data, bytes);
  return __real__ZN3hbm3mpi4Comm5irecvEPvmii(comm, data, bytes, peer, tag);
}
}

namespace {

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(std::string(name) + " is not set");
  return value;
}

void run_collectives(const Rank& rank, memory::Policy policy) {
  memory::bind(memory::BindMode::kNuma, rank.rank, rank.size);
  Group group = rank.group("vm", kChunkBytes);
  group.channel->staging = memory::process_staging(policy, kStagingBytes);

  std::vector<float> values(kCount, static_cast<float>(rank.rank + 1));
  ASSERT_EQ(group.run(group.communicator->allreduce(group.sequence++, values.data(), values.data(),
                                                    kCount, Dtype::kFloat32, ReduceOp::kSum)),
            nullptr);
  const int sum = rank.size * (rank.size + 1) / 2;
  EXPECT_EQ(std::count(values.begin(), values.end(), static_cast<float>(sum)), kCount);

  if (rank.rank == 0) std::iota(values.begin(), values.end(), 0.0f);
  ASSERT_EQ(group.run(group.communicator->broadcast(group.sequence++, values.data(), kCount,
                                                    Dtype::kFloat32, /*root=*/0)),
            nullptr);
  EXPECT_EQ(values.back(), static_cast<float>(kCount - 1));
  ASSERT_EQ(group.run(group.communicator->barrier(group.sequence++)), nullptr);

  std::vector<Block> blocks;
  for (const auto& [data, bytes] : handed) blocks.push_back({data, bytes});
  report("rank " + std::to_string(rank.rank), blocks, "");
}

TEST(MpiBuffers, OfAnAllreduceAndABroadcast) {
  const memory::Policy policy = memory::parse_policy(setting("VM_POLICY"));
  run_ranks(std::stoi(setting("VM_RANKS")),
            [policy](const Rank& rank) { run_collectives(rank, policy); });
}

}  // namespace
}  // namespace hbm::mpi
